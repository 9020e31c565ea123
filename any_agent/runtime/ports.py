"""TCP ports, the names of hosts, and URLs."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress

from any_agent.errors import ConfigError


def reserve(host: str, port: int) -> socket.socket:
    """Return a socket, bound to a port (0: any free one), that will listen.

    ConfigError for a port in use, unless a process of the same user keeps it (:func:`keep`).
    """
    try:
        return _bound(host, port, socket.SO_REUSEADDR)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and not _has_listener(host, port):
            with suppress(OSError):
                return _bound(host, port, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
        raise _cannot_listen(host, port, error) from None


def keep(host: str, port: int = 0) -> socket.socket:
    """Return a socket that keeps a port for listeners of other processes, and never listens.

    While it is open, only sockets of the same user that set SO_REUSEPORT get the port, as those of
    :func:`reserve` do, also several times. With SO_REUSEADDR, any user's sockets would get it as
    long as none listens.
    """
    try:
        return _bound(host, port, socket.SO_REUSEPORT)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None


def _bound(host: str, port: int, *options: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        for option in options:
            made.setsockopt(socket.SOL_SOCKET, option, 1)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def _has_listener(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def accept_on(bound: socket.socket, backlog: int) -> None:
    """Have a bound socket listen; ConfigError if another process listens there by now."""
    try:
        bound.listen(backlog)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _cannot_listen(host, port, error) from None


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {host}:{port}: {error.strerror}; stop the program that uses it, or "
        "choose another port, with server.port or --port (0 picks a free one)"
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
