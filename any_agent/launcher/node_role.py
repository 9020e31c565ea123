"""The parts of a service that one machine runs, and their addresses for other machines."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

from any_agent.config import Config
from any_agent.rundir.fleet import Fleet

LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class TrainingNodes:
    """The machines that train together, this one's index, and the address where they meet."""

    count: int
    index: int
    address: str
    """The first machine's address."""
    port: int


@dataclass(frozen=True, slots=True)
class NodeRole:
    """One machine's share of a service; by default all of it."""

    host: str = LOCAL
    """Address on which engines, proxies and the trainer listen; only the service's own machines
    reach it."""
    ranks: tuple[int, ...] | None = None
    """Ranks whose engines and proxies are here, numbered over the whole service; None: all."""
    router: bool = True
    """True if the router is here; only its machine locks the run's folder for the service."""
    trainer: bool = True
    training: TrainingNodes | None = None
    """The machines that train together; None: at most this one."""
    public_url: str = ""
    """The service's URL, if the router is on another machine."""
    gpus_taken: int = 0
    """GPUs of this machine, its last ones, that another launcher's engines have."""
    machine: str = field(default_factory=lambda: socket.gethostname().partition(".")[0])
    """The machine's name, which identifies its disk."""

    def ranks_of(self, config: Config, fleet: Fleet | None = None) -> tuple[int, ...]:
        """Return the ranks that are here; ``fleet``: those of the service, if it is known."""
        if self.ranks is not None:
            return self.ranks
        return tuple(range(config.server.ranks)) if fleet is None else fleet.ranks


WHOLE = NodeRole()


def trainer_arguments(config: Config, settings: Path, place: NodeRole) -> list[str]:
    """Return the arguments after `python -m` of a trainer with these resolved settings.

    If several processes train, this process starts this machine's share of them and ends with them;
    they report its process id as the trainer's.
    """
    each = ["--config", str(settings), "--host", place.host]
    together = place.training
    if config.train.processes == 1 and (together is None or together.count == 1):
        return ["trainer", *each]
    arguments = ["trainer.parallel", "--processes", str(config.train.processes)]
    arguments += ["--host", place.host]
    if together is not None:
        arguments += ["--machines", str(together.count), "--machine", str(together.index)]
        arguments += ["--address", together.address, "--port", str(together.port)]
    return [*arguments, "--", *each]
