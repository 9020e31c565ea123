"""Listening on TCP ports, and their URLs."""

from __future__ import annotations

import socket

from any_agent.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, 0 for any free port; ConfigError when something else has the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def accept_on(bound: socket.socket, backlog: int) -> None:
    """Have a bound socket listen; ConfigError when something else was faster."""
    try:
        bound.listen(backlog)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host}:{port}: {error.strerror}; stop what uses it, or set "
        "server.port to another one (0 picks a free one)"
    )


def reserve(host: str, port: int) -> socket.socket:
    """Keep a port (0: any free one) for a child that will listen on it, now and again later.

    The socket is bound and never listens: nothing else gets the port, no outgoing connection
    either, but a child that sets SO_REUSEADDR may listen there for as long as it is open.
    """
    return listen(host, port)


def free_port(host: str) -> int:
    """A port that nothing listened on a moment ago."""
    with listen(host, 0) as listener:
        return int(listener.getsockname()[1])


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
