"""Ranks with clients that a test brings, in a fleet that changes as it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from any_agent.rollout import RankClients
from any_agent.rundir.fleet import Fleet, FleetFile


class FixedRanks(RankClients):
    """Stands for the ranks 0, 1, ... whose clients these are; they have no addresses."""

    def __init__(self, *clients: Any) -> None:
        super().__init__(Path("nowhere"), FleetFile(None, 0))
        self._fleet = FleetFile(None, len(clients))
        self.clients = dict(enumerate(clients))

    def change(self, fleet: Fleet, **clients: Any) -> None:
        """``clients``: those of new ranks, as `rank_2=...`."""
        self.clients |= {int(name.partition("_")[2]): new for name, new in clients.items()}
        self._fleet.now = fleet
