"""The cloud's process: ``python -m router.cloud --config FILE``."""

from __future__ import annotations

import argparse
import signal
import sys

from any_agent.config.base import LOOPBACK
from any_agent.config.cloud import load_cloud
from any_agent.errors import ConfigError
from any_agent.runtime.command_line import guarded
from any_agent.runtime.logs import set_up_logging
from any_agent.runtime.open_files import raise_open_files_limit
from any_agent.runtime.ports import accept_on, port_of, reachable, reserve, url_of

_BACKLOG = 2048


def main() -> int:
    # Until it serves, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(
        prog="python -m router.cloud", description="One URL for the runs of many accounts."
    )
    parser.add_argument("--config", required=True, help="the YAML of models, presets and limits")
    return guarded(lambda: _serve(parser.parse_args().config))


def _serve(path: str) -> int:
    config = load_cloud(path)
    server = config.server
    set_up_logging("info", "text", part="cloud", secrets=[config.admin_key.get_secret_value()])
    if server.host not in LOOPBACK and server.public_url is None:
        raise ConfigError(
            "server.public_url must be the URL that agents reach, such as https://rl.example.org: "
            f"{server.host} is reachable from outside"
        )
    listener = reserve(server.host, server.port)
    accept_on(listener, _BACKLOG)
    raise_open_files_limit()
    from router.cloud.app import running_cloud
    from router.entrance import serve

    url = server.public_url or url_of(reachable(server.host), port_of(listener))
    print(
        f"any-agent cloud at {url}: {config.places} places, {len(config.models)} models", flush=True
    )
    serve(lambda: running_cloud(config, listener, url), config.stop_timeout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
