"""The Redis of a job, on its first node: ``python -m any_agent.launcher.slurm.job_redis FOLDER``.

The process takes the server's place. It gets the password with the URL, by the environment, and
passes it on by its standard input, so that no list of processes and no file shows it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from any_agent.config import JOURNAL_VARIABLE, Config
from any_agent.errors import ConfigError
from any_agent.launcher.process import Command
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import make_folder
from any_agent.runtime.command_line import guarded
from any_agent.runtime.ports import free_port

PROGRAM = "redis-server"
_ANSWER_SECONDS = 2.0
_SETTINGS = """\
bind {host}
port {port}
requirepass {password}
appendonly yes
appendfsync always
save ""
"""


def require_alone(config: Config) -> None:
    """Raise ConfigError if the settings name another Redis, too."""
    if config.cluster.redis and config.server.journal is not None:
        raise ConfigError(
            "cluster.redis starts a Redis of the job, and server.journal is the URL of another "
            "one: remove one of them"
        )


def require_redis(config: Config, node: str) -> None:
    """Raise ConfigError if this node cannot run the server, or the settings name another one."""
    require_alone(config)
    if shutil.which(PROGRAM) is None:
        raise ConfigError(
            f"cluster.redis is set, but {PROGRAM} is not found on {node}, the job's first node: "
            "install it there (apt-get install redis-server, or `module load redis`), or run one "
            "elsewhere and set server.journal to its URL instead"
        )
    if find_spec("redis") is None:
        raise ConfigError(
            "cluster.redis is set, but the package redis is not installed: pip install "
            "'any-agent-rl[redis]'"
        )


def new_url(host: str) -> SecretStr:
    """Return a URL with a free port of this machine and a new password."""
    named = f"[{host}]" if ":" in host else host
    return SecretStr(f"redis://:{secrets.token_urlsafe(24)}@{named}:{free_port(host)}/0")


def redis_folder(run: RunDir) -> Path:
    """Return the folder of the server's file: shared, as the next job may have other nodes."""
    return run.path / "redis"


def redis_command(run: RunDir) -> Command:
    """Return the command of the server, which needs the variable of `server.journal`."""
    folder = redis_folder(run)
    make_folder(folder)
    return Command([__name__, str(folder)])


def redis_ready(config: Config) -> bool:
    """Return whether the server takes our login, and has read its file."""
    import redis

    assert config.server.journal is not None
    url = config.server.journal.get_secret_value()
    try:
        with redis.Redis.from_url(url, socket_timeout=_ANSWER_SECONDS) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def _run(folder: str) -> int:
    # Its own environment has no password.
    url = urlsplit(os.environ.pop(JOURNAL_VARIABLE))
    settings = _SETTINGS.format(host=url.hostname, port=url.port, password=url.password)
    os.chdir(folder)
    read, write = os.pipe()
    os.write(write, settings.encode())  # less than the pipe holds
    os.close(write)
    os.dup2(read, sys.stdin.fileno())
    os.execvp(PROGRAM, [PROGRAM, "-"])


if __name__ == "__main__":
    sys.exit(guarded(lambda: _run(sys.argv[1])))
