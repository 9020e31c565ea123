"""A rank's place in the fleet: whether it may begin new sessions and groups.

A group must never begin at two ranks. A router asks the homes that a group would have had under
earlier fleets whether they have it, and begins it at the present home only if none does. A rank
that has denied this knows the router's fleet, and begins no group for a router that knows an older
one. Nothing of it is stored: after a restart the rank reads a fleet that is at least as new.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request

from any_agent.errors import Conflict, Draining, Misdirected
from any_agent.protocol.rl import FLEET_HEADER
from any_agent.rundir.fleet import Fleet, FleetFile

_HEADER = re.compile(r"([0-9]{1,15})( member)?")


class RouterChoice(NamedTuple):
    """The grounds on which a router chose this rank for an open."""

    number: int | None = None
    """The number of the fleet that it knows; None without a router."""
    member: bool = False
    """The open is for a group that this rank may have, and for nothing else."""


def choice_of(request: Request) -> RouterChoice:
    """Return the router's choice by the request's header."""
    match = _HEADER.fullmatch(request.headers.get(FLEET_HEADER, ""))
    return RouterChoice(int(match[1]), match[2] is not None) if match else RouterChoice()


class FleetPlace:
    """The fleet as one rank knows it."""

    def __init__(self, path: Path | None, rank: int, count: int) -> None:
        """``path`` as for `FleetFile`; without one, all of so many ranks serve."""
        self._file = FleetFile(path, count)
        self._file.refresh()
        self._rank = rank

    @property
    def fleet(self) -> Fleet:
        return self._file.now

    @property
    def retired(self) -> bool:
        """True if the rank takes only members of groups that it has."""
        return self.fleet.state(self._rank) not in ("serving", "joining")

    async def refresh(self) -> None:
        """Read the fleet again; a thread does it, so that no stream waits for the disk."""
        await asyncio.to_thread(self._file.refresh)

    async def catch_up(self, choice: RouterChoice) -> None:
        """Know a fleet that is at least as new as the router's."""
        if choice.number is not None and choice.number > self.fleet.number:
            await self.refresh()

    def require_new(self, choice: RouterChoice, *, lane: bool = False) -> None:
        """Raise unless a session without a group, or a group, may begin here now.

        Misdirected if the router must ask another rank, Draining if this one ends; Conflict
        (`lane_on_other_rank`) for a session of a ``lane``, which no other rank can open.
        """
        if choice.member:
            raise Misdirected("this rank has no such group")
        if choice.number is not None and choice.number < self.fleet.number:
            raise Misdirected("the ranks of this service have changed; choose again")
        if self.fleet.state(self._rank) == "serving":
            return
        if lane:
            raise Conflict(
                "the key's rank is drained and takes no new sessions; open without api_key",
                code="lane_on_other_rank",
            )
        raise retiring()


def retiring() -> Draining:
    """Return the error of new sessions at a rank that is drained."""
    return Draining("this rank is drained and takes no new sessions; try again", retry_after=1)
