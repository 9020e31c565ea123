"""The limit of open files: raised at the start, and never spent on connections alone.

A process without a descriptor left can write neither its registry entry nor its journal, and is
killed for it. So a server takes fewer connections than it has descriptors for.
"""

from __future__ import annotations

import json
import resource
import sys
from collections import OrderedDict
from contextlib import suppress
from typing import Literal, Protocol

from any_agent.errors import ServiceUnavailable

_MOST = 1 << 20  # a container may allow a billion, which slows down programs that close them all
HEALTH = frozenset({"/healthz", "/readyz", "/health", "/metrics"})
"""Paths that are answered on connections above the bound."""
_RESERVED = 128  # descriptors for the journal, the registry, logs, pipes, and libraries
_SPARE = 32  # connections above the bound on which health is answered, and all else refused
_TRIES = 256  # connections that are looked at to find an idle one
Room = Literal["any", "health", "none"]
"""The requests for which a connection is taken; with ``none`` it is closed at once."""


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files, often 1,024, to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        # Refused in some sandboxes; the lower limit is kept to, then.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def connections_for_descriptors() -> int:
    """Return how many connections a server may hold: each request under way may need another one,
    to a rank or an engine."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(8, (soft - _RESERVED - _SPARE) // 2)


class Connection(Protocol):
    """A connection of a server."""

    def close_if_idle(self, answer: bytes) -> bool:
        """Write ``answer`` and close, if no request is being answered; return whether it was so."""


class ConnectionLimit:
    """The bound on a server's connections by its descriptors.

    Far above it, the connection that has been idle for longest makes room for each new one, which
    may be a probe of the service's health: first those that were above the bound themselves, then
    those that never had a request.
    """

    def __init__(self) -> None:
        self.most = connections_for_descriptors()
        self.open = 0
        """Number of connections now."""
        self._crowded: OrderedDict[Connection, None] = OrderedDict()
        """Connections above the bound, the ones that were heard last at the end."""
        self._unused: OrderedDict[Connection, None] = OrderedDict()
        """The other connections without a request yet."""
        self._used: OrderedDict[Connection, None] = OrderedDict()

    def enter(self, connection: Connection) -> Room:
        """Count a new connection, and return what it may be used for."""
        self.open += 1
        if self.open <= self.most:
            self._unused[connection] = None
            return "any"
        if self.open > self.most + _SPARE and not self._close_one():
            return "none"
        self._crowded[connection] = None
        return "health"

    def hear(self, connection: Connection, *, used: bool) -> None:
        """Note that a connection has sent something; ``used``: it has had a request."""
        if connection in self._crowded:
            self._crowded.move_to_end(connection)
        elif connection in self._used:
            self._used.move_to_end(connection)
        elif connection in self._unused:
            if used:
                del self._unused[connection]
                self._used[connection] = None
            else:
                self._unused.move_to_end(connection)

    def leave(self, connection: Connection) -> None:
        """Count the end of a connection, whatever it was used for."""
        self.open -= 1
        for known in (self._crowded, self._unused, self._used):
            known.pop(connection, None)

    def _close_one(self) -> bool:
        """Close the connection that has been idle for longest; False if none was found."""
        for known in (self._crowded, self._unused, self._used):
            answer = b"" if known is self._used else self.answer()
            for _ in range(min(_TRIES, len(known))):
                connection = next(iter(known))
                if connection.close_if_idle(answer):
                    del known[connection]
                    return True
                # Others are looked at first the next time.
                known.move_to_end(connection)
        return False

    def error(self) -> ServiceUnavailable:
        """Return the refusal of a request on a connection above the bound."""
        return ServiceUnavailable(
            f"this process has {self.most} connections, as many as its limit of open files "
            "(ulimit -n) has room for; try again",
            code="too_many_connections",
            retry_after=2,
        )

    def answer(self) -> bytes:
        """Return the refusal as an answer for a connection of which nothing was read yet."""
        error = self.error()
        body = json.dumps(error.body()).encode()
        lines = ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(body)}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in error.headers().items()]
        return "\r\n".join([*lines, "", ""]).encode() + body
