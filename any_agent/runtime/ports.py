"""TCP ports, the names of hosts, and URLs."""

from __future__ import annotations

import socket

from any_agent.errors import ConfigError


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port (0: any free one); ConfigError if it is in use.

    While it does not listen, no other program or outgoing connection gets the port, but a child
    that sets SO_REUSEADDR may listen there, also several times.
    """
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
    """Have a bound socket listen; ConfigError if another process listens there by now."""
    try:
        bound.listen(backlog)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host}:{port}: {error.strerror}; stop the program that uses it, or set "
        "server.port to another port (0 picks a free one)"
    )


def free_port(host: str) -> int:
    """Return a port that was free a moment ago."""
    with reserve(host, 0) as listener:
        return port_of(listener)


def port_of(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reachable(host: str) -> str:
    """Return the name by which other machines reach ``host``, which may mean all addresses."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else host


def from_here(host: str) -> str:
    """Return the name by which this machine itself reaches ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
