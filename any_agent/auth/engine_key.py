"""The key that a run's engines require of their clients: the ranks, the trainer, the doctor.

The service writes it at each start, derived from the run's signing secret, into a file that only
its owner reads: so no command line shows it, the parts of several machines find it, and it stays
the same until the service ends, also when the secrets are rotated. The file has the form of
SGLang's own settings.
"""

from __future__ import annotations

import json
from pathlib import Path

from any_agent.auth.access import run_dir_of
from any_agent.config import Config
from any_agent.errors import StartupError
from any_agent.keys import engine_key
from any_agent.rundir.layout import RunDir, read_json
from any_agent.runtime.atomic_files import write_atomic

# SGLang without an `admin-api-key` of its own requires this key on every route, those that change
# weights included; its routes below `/health` and `/metrics` alone are open.
_SETTING = "api-key"


def write_engine_key(run: RunDir) -> None:
    """Write the key of the engines that this start of the service uses."""
    write_key_file(run.engine_key, engine_key(run.signing_secret()))


def write_key_file(path: Path, key: str) -> None:
    """Write a key for an engine to read at its start."""
    write_atomic(path, json.dumps({_SETTING: key}) + "\n")


def read_key_file(path: Path) -> str:
    """Return the key in a file of :func:`write_key_file`; StartupError without one."""
    try:
        key = read_json(path, {}).get(_SETTING)
    except (OSError, ValueError, AttributeError) as error:
        raise StartupError(f"the engines' key cannot be read from {path}: {error}") from None
    if not isinstance(key, str) or not key:
        raise StartupError(
            f'{path} holds no key of an engine ({{"{_SETTING}": "..."}}); the service writes its '
            "own when it starts"
        )
    return key


def key_of_engines(config: Config) -> str | None:
    """Return the key for requests to a run's engines.

    That of engines which the service did not start is `engine.key`; None if they need none.
    """
    path = run_dir_of(config).engine_key
    if config.engine.urls or not path.exists():
        return config.engine.secret_key
    return read_key_file(path)
