"""Which parts of a service one machine runs, and where the other machines reach them."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from any_agent.config import Config

LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class TrainingNodes:
    """Of several machines that train together, which one this is, and where they meet."""

    count: int
    index: int
    address: str
    """Of the first of them."""
    port: int


@dataclass(frozen=True, slots=True)
class NodeRole:
    """One machine's share of a service; by default all of it."""

    host: str = LOCAL
    """What engines, proxies and the trainer listen on: an address that only the service's own
    machines reach."""
    ranks: tuple[int, ...] | None = None
    """Whose engines and proxies are here, by their numbers in the whole service. None: all."""
    router: bool = True
    """The machine with the router also makes the run's folder the service's, and is alone in
    that: the others find it made."""
    trainer: bool = True
    training: TrainingNodes | None = None
    """Several machines train together. None: this one alone, if it does."""
    public_url: str = ""
    """The service's, where the router is elsewhere."""
    machine: str = field(default_factory=lambda: socket.gethostname().partition(".")[0])
    """Its name, by which its disk is known."""

    def ranks_of(self, config: Config) -> tuple[int, ...]:
        return tuple(range(config.server.ranks)) if self.ranks is None else self.ranks


WHOLE = NodeRole()
