"""The router's process: ``python -m router --config FILE --host H --port P``."""

from __future__ import annotations

import argparse
import signal
import socket
import sys

from any_agent.auth.access import require_key
from any_agent.config import load_resolved
from any_agent.runtime.command_line import guarded
from any_agent.runtime.logs import set_up_logging
from any_agent.runtime.open_files import raise_open_files_limit
from any_agent.runtime.ports import reserve, url_of


def main() -> int:
    # Until the router serves, Ctrl-C ends the process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser(prog="python -m router", description="One URL for all ranks.")
    parser.add_argument("--config", required=True, help="the run's resolved YAML")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument(
        "--listener", type=int, help="file descriptor of an inherited socket that listens already"
    )
    parser.add_argument("--public-url", help="URL that agents call; default: http://host:port")
    args = parser.parse_args()
    return guarded(lambda: _serve(args))


def _serve(args: argparse.Namespace) -> int:
    config = load_resolved(args.config)
    set_up_logging(config.log_level, config.log_format, part="router", secrets=config.secrets())
    for host in (args.host, config.server.host):
        require_key(config, host)
    inherited = args.listener
    listener = (
        reserve(args.host, args.port) if inherited is None else socket.socket(fileno=inherited)
    )
    raise_open_files_limit()
    from router.app import running_router
    from router.entrance import serve

    url = args.public_url or url_of(*listener.getsockname()[:2])
    serve(lambda: running_router(config, listener, url), config.server.drain_timeout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
