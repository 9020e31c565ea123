"""Ports for processes that a test starts."""

from __future__ import annotations

import socket

from any_agent.runtime.ports import port_of, reserve

_HELD: list[socket.socket] = []


def own_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody else gets while this process lives.

    Who connects is refused, until a process that was told of it listens there.
    """
    _HELD.append(reserve(host, 0))
    return port_of(_HELD[-1])
