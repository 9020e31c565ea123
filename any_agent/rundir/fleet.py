"""The fleet: the ranks of a run, which may be added and drained while agents work.

`fleet.json` in the run's folder has it. The launcher alone writes it; router, ranks and trainer
read it again at each look, and take the ranks from `server.ranks` until it is there.

A rank is in one of these states, and none once its processes have ended for good:

::

    joining    its engine and proxy start, and it gets the present weights
    serving    it takes sessions and groups
    draining   it takes members of groups that it already has, and nothing else
    drained    it has nothing left to do, and its engine has ended; its proxy stays for a resume of
               the training from a checkpoint that is older than its last trained session

A group's home is computed from the ranks that served at the group's birth. Every set of ranks that
ever served is kept, so that the home of each group that may live can be found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from any_agent.errors import StartupError
from any_agent.runtime.atomic_files import write_atomic

RankState: TypeAlias = Literal["joining", "serving", "draining", "drained"]


class Fleet(BaseModel):
    """The ranks of a run at one moment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = 1
    """The number of sets of ranks that have served one after the other, which only grows."""
    served: tuple[tuple[int, ...], ...]
    """The sets of ranks that served at some time, each once; the last one serves now."""
    others: dict[int, Literal["joining", "draining", "drained"]] = {}
    """The ranks that run and do not serve."""

    @classmethod
    def of(cls, count: int) -> Self:
        """Return the fleet of a run that begins with so many ranks."""
        return cls(served=(tuple(range(count)),))

    @property
    def serving(self) -> tuple[int, ...]:
        return self.served[-1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that run, in order."""
        return tuple(sorted({*self.serving, *self.others}))

    def state(self, rank: int) -> RankState | None:
        """Return a rank's state; None for one that does not run."""
        return "serving" if rank in self.serving else self.others.get(rank)

    def knew(self, rank: int) -> bool:
        """Return whether the rank serves or served at some time."""
        return any(rank in ranks for ranks in self.served)

    def with_state(self, rank: int, state: RankState | None) -> Self:
        """Return the fleet with a rank in another state; None: it has ended."""
        others = {number: other for number, other in self.others.items() if number != rank}
        serving = {number for number in self.serving if number != rank}
        if state == "serving":
            serving.add(rank)
        elif state is not None:
            others[rank] = state
        return self._serving(serving, others)

    def resized(self, count: int) -> Self:
        """Return the fleet for a start with so many ranks: further ones serve at once, and of too
        many the highest drain."""
        others = {n: state for n, state in self.others.items() if state != "joining"}
        serving = list(self.serving)
        # A rank that was to end is continued before another number is used.
        while len(serving) < count:
            taken = {*serving, *others}
            rank = min(others, default=next(n for n in range(len(taken) + 1) if n not in taken))
            others.pop(rank, None)
            serving.append(rank)
        for rank in sorted(serving)[count:]:
            serving.remove(rank)
            others[rank] = "draining"
        return self._serving(serving, others)

    def _serving(self, serving: Iterable[int], others: Mapping[int, RankState]) -> Self:
        now = tuple(sorted(serving))
        if now == self.serving:
            return self.model_copy(update={"others": others})
        served = (*(ranks for ranks in self.served if ranks != now), now)
        return self.model_copy(
            update={"number": self.number + 1, "served": served, "others": others}
        )


class FleetFile:
    """A reader's view of `fleet.json`, or with ``path`` None a fleet that never changes."""

    def __init__(self, path: Path | None, count: int) -> None:
        """``count``: the ranks while there is no file."""
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self.now = Fleet.of(count)

    def refresh(self) -> Fleet:
        """Return the fleet as it is now; the last one where the file cannot be read."""
        if self._path is not None:
            try:
                with open(self._path, "rb") as file:
                    stat = os.fstat(file.fileno())
                    stamp = stat.st_mtime_ns, stat.st_ino
                    if stamp != self._stamp:
                        self.now = Fleet.model_validate_json(file.read())
                        self._stamp = stamp
            except (OSError, ValidationError):
                pass
        return self.now


def load_fleet(path: Path) -> Fleet | None:
    """Return the run's fleet; None before its first start. StartupError for a damaged file."""
    try:
        return Fleet.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise StartupError(
            f"{path} is damaged ({error.errors()[0]['msg']}): restore it from a copy, or remove it "
            "if no session is open and none waits to be trained on"
        ) from None


def save_fleet(path: Path, fleet: Fleet) -> None:
    """Replace the run's fleet durably; a reader sees the old or the new one."""
    write_atomic(path, fleet.model_dump_json())
