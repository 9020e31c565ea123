"""The launcher's part in a fleet that changes: commands, ranks that join, and ranks that drain.

`any-agent ranks` puts a request into the run's folder, and the launcher its answer beside it. The
launcher alone can start and end processes, and it watches the folder anyway; only the run's owner
can write there, so that a request needs no key, no port and no router that is up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from any_agent.errors import AnyAgentError, Conflict, NotFound
from any_agent.launcher.component import Component
from any_agent.launcher.rank_parts import RankParts
from any_agent.rundir.fleet import Fleet, RankState, save_fleet
from any_agent.rundir.layout import RunDir, read_json
from any_agent.rundir.registry import HEARTBEAT, Registry, RegistryEntry, rank_name
from any_agent.runtime.atomic_files import append_line, make_folder, write_atomic

MAX_RANKS = 1000
LEAVE = 3.0
"""Seconds from a change of the fleet until a process ends: by then all have read the fleet."""
_KILL_AFTER = 10.0  # seconds beyond `server.drain_timeout` after which a process is killed
_REQUEST = ".request.json"
_ANSWER = ".answer.json"


class RanksRequest(BaseModel):
    """A command of `any-agent ranks`."""

    action: Literal["add", "drain"]
    rank: int | None = None
    """The rank to drain."""
    who: str = ""


class RanksAnswer(BaseModel):
    """The launcher's answer to a command."""

    done: bool
    message: str
    rank: int | None = None


def exchange_paths(run: RunDir, id: str) -> tuple[Path, Path]:
    """Return the files of a request with this id and of its answer."""
    folder = run.fleet_commands
    return folder / f"{id}{_REQUEST}", folder / f"{id}{_ANSWER}"


@dataclass(slots=True)
class _Ending:
    """Processes that are to end, the rank's proxy before its engine."""

    rank: int
    names: list[str]
    begins: float
    """The time when the first one is signalled."""
    kill_at: float | None = None
    """The time when the first one is killed, once it was signalled."""


class FleetController:
    """Changes the fleet of a running service. Call :meth:`poll` in the launcher's thread."""

    def __init__(
        self,
        run: RunDir,
        parts: dict[str, Component],
        ranks: RankParts,
        *,
        say: Callable[[str], None],
        save: Callable[[Fleet], None],
        drain_timeout: float,
    ) -> None:
        """``save`` is called when other ranks serve."""
        self._run = run
        self._parts = parts
        self._ranks = ranks
        self._save = save
        self._say = say
        self._drain_timeout = drain_timeout
        self._registry = Registry(run.registry)
        self._polled_at = 0.0
        self._endings: list[_Ending] = []
        self._wanted: dict[int, int] = {}
        """The version that each rank which joins must have."""
        self.fixed = ""
        """The reason why the fleet cannot change here, "" for none."""
        self.fleet = Fleet.of(0)

    def begin(self, before: Fleet | None, count: int) -> Fleet:
        """Save the fleet of a start with so many ranks, after ``before``; drop requests to earlier
        services."""
        self.fleet = Fleet.of(count) if before is None else before.resized(count)
        save_fleet(self._run.fleet, self.fleet)
        make_folder(self._run.fleet_commands)
        for old in self._run.fleet_commands.iterdir():
            old.unlink()
        for rank in sorted(self.fleet.others):
            self._say(f"rank {rank:<4} drains: it is none of server.ranks={count} any more")
        return self.fleet

    def poll(self) -> None:
        """Answer commands, and advance ranks that join or drain, once per heartbeat."""
        now = time.monotonic()
        if now - self._polled_at < HEARTBEAT / 2:
            return
        self._polled_at = now
        self._answer_requests()
        self._registry.refresh()
        for rank, state in sorted(self.fleet.others.items()):
            if state == "joining":
                self._advance_joining(rank)
            else:
                self._advance_draining(rank, state)
        self._endings = [ending for ending in self._endings if self._go_on(ending, now)]

    def abandon(self, part: str, error: AnyAgentError) -> bool:
        """Remove the rank of a part that cannot start while it joins; False for any other part."""
        kind, _, number = part.partition("-")
        rank = int(number) if kind in ("engine", "rank") else -1
        if self.fleet.state(rank) != "joining":
            return False
        self._say(f"rank {rank:<4} could not be added: {error.message}")
        self._end(rank)
        return True

    # -- commands ------------------------------------------------------------------------------

    def _answer_requests(self) -> None:
        # One that is still being written has a hidden name.
        for path in sorted(self._run.fleet_commands.glob(f"[!.]*{_REQUEST}")):
            _, answered = exchange_paths(self._run, path.name.removesuffix(_REQUEST))
            try:
                request = RanksRequest.model_validate_json(path.read_bytes())
                answer = self._answer(request)
            except FileNotFoundError:
                # Its sender has given up.
                continue
            except ValidationError:
                answer = RanksAnswer(done=False, message="the request cannot be read")
            except AnyAgentError as error:
                answer = RanksAnswer(done=False, message=error.message)
            path.unlink(missing_ok=True)
            write_atomic(answered, answer.model_dump_json())

    def _answer(self, request: RanksRequest) -> RanksAnswer:
        if self.fixed:
            raise Conflict(self.fixed)
        if request.action == "add":
            rank = self._add()
            message = f"rank {rank} is started; it serves once it has the present weights"
        else:
            rank = -1 if request.rank is None else request.rank
            message = self._drain(rank)
        self._audit(request, rank)
        return RanksAnswer(done=True, message=message, rank=rank)

    def _add(self) -> int:
        leaving = {ending.rank for ending in self._endings}
        rank = next(n for n in range(2 * MAX_RANKS) if n not in {*self.fleet.ranks, *leaving})
        if rank >= MAX_RANKS:
            raise Conflict(f"a service has at most {MAX_RANKS} ranks")
        self._ranks.prepare(rank)
        self._set(rank, "joining")
        self._ranks.start_engine(rank)
        self._say(f"rank {rank:<4} is added")
        return rank

    def _drain(self, rank: int) -> str:
        state = self.fleet.state(rank)
        if state is None:
            known = ", ".join(map(str, self.fleet.ranks))
            raise NotFound(f"there is no rank {rank}; the ranks are {known}")
        if state in ("draining", "drained"):
            raise Conflict(f"rank {rank} drains already: `any-agent ranks list` shows its progress")
        if state == "joining":
            self._say(f"rank {rank:<4} is not added after all")
            self._end(rank)
            return f"rank {rank}, which did not serve yet, ends"
        if len(self.fleet.serving) == 1:
            raise Conflict(
                f"rank {rank} is the last one that serves: add another one first (`any-agent ranks "
                "add`), or stop the service"
            )
        self._set(rank, "draining")
        self._say(f"rank {rank:<4} drains: it takes no new sessions and groups")
        return f"rank {rank} drains; it ends when its sessions have ended and were trained on"

    def _audit(self, request: RanksRequest, rank: int) -> None:
        make_folder(self._run.audit)
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = {"at": at, "event": f"ranks {request.action}", "who": request.who, "rank": rank}
        append_line(self._run.audit / "ranks.jsonl", json.dumps(line))

    # -- ranks that join and drain ---------------------------------------------------------------

    def _advance_joining(self, rank: int) -> None:
        name, engine = rank_name(rank), self._parts.get(f"engine-{rank}")
        if name not in self._parts:
            if engine is not None and engine.state == "ready":
                self._ranks.start_proxy(rank)
        elif self._may_serve(rank):
            self._set(rank, "serving")
            self._say(f"rank {rank:<4} serves")

    def _may_serve(self, rank: int) -> bool:
        """Return whether a rank that joins has the present weights, and gets all later ones.

        A trainer that sets its limit gives it each version whose update begins from then on. The
        number of a version is on disk before its update begins. So with the highest one that is
        there once the rank is led, it has missed none.
        """
        entry = self._entry(rank)
        if entry is None or not entry.engine_up:
            return False
        if self._registry.alive("trainer"):
            if not entry.led:
                return False
            highest = int(read_json(self._run.state, {}).get("highest_version", 0))
            return entry.version >= self._wanted.setdefault(rank, highest)
        others = [self._registry.get(rank_name(other)) for other in self.fleet.serving]
        return all(other is None or other.version == entry.version for other in others)

    def _advance_draining(self, rank: int, state: RankState) -> None:
        entry = self._entry(rank)
        if entry is None or not entry.retired or entry.unfinished:
            return
        if not entry.replayable:
            self._end(rank)
            self._say(f"rank {rank:<4} is drained and ends")
        elif state == "draining":
            self._set(rank, "drained")
            self._say(
                f"rank {rank:<4} is drained: its engine ends; its proxy ends once no checkpoint is "
                "kept from which its sessions would be trained on again"
            )
            self._end_parts(rank, [f"engine-{rank}"])

    def _entry(self, rank: int) -> RegistryEntry | None:
        """Return the entry of a rank's present process, if it writes one."""
        name = rank_name(rank)
        part, entry = self._parts.get(name), self._registry.get(name)
        own = part is not None and part.state == "ready" and entry is not None
        if not own or entry is None or part is None or entry.pid != part.pid:
            return None
        return entry if self._registry.alive(name) else None

    def _set(self, rank: int, state: RankState | None) -> None:
        served = self.fleet.serving
        self._wanted.pop(rank, None)
        self.fleet = self.fleet.with_state(rank, state)
        save_fleet(self._run.fleet, self.fleet)
        if self.fleet.serving != served:
            self._save(self.fleet)

    def _end(self, rank: int) -> None:
        """End a rank's processes; at once if it never served, so that nobody uses it."""
        served = self.fleet.knew(rank)
        self._set(rank, None)
        self._end_parts(rank, [rank_name(rank), f"engine-{rank}"], after=LEAVE if served else 0.0)

    def _end_parts(self, rank: int, names: list[str], *, after: float = LEAVE) -> None:
        parts = [name for name in names if name in self._parts]
        if not after:
            for name in parts:
                self._parts[name].terminate()
        self._endings.append(_Ending(rank, parts, time.monotonic() + after))

    def _go_on(self, ending: _Ending, now: float) -> bool:
        """Advance the end of a rank's processes; return False when the last one is gone."""
        if now < ending.begins:
            return True
        while ending.names:
            name = ending.names[0]
            part = self._parts.get(name)
            if part is None:
                # An earlier end of this rank's engine was under way, and is over.
                ending.names.pop(0)
                continue
            if ending.kill_at is None:
                part.drain()
                ending.kill_at = now + self._drain_timeout + _KILL_AFTER
            if part.running and now < ending.kill_at:
                return True
            part.stop(grace=0.0)
            del self._parts[name]
            ending.names.pop(0)
            ending.kill_at = None
            if name != rank_name(ending.rank):
                self._ranks.release(ending.rank)
        if self.fleet.state(ending.rank) is None:
            (self._run.registry / f"{rank_name(ending.rank)}.json").unlink(missing_ok=True)
            self._ranks.forget(ending.rank)
        return False
