"""The overview: one look at the whole run, made at most once in a moment for all who watch it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import RegistryEntry, rank_name
from router.dashboard.alarms import Alarm, Part, alarms_of
from router.dashboard.ranks import RankReader, Visitor
from router.dashboard.scrape import Rates, Samples
from router.dashboard.training import StepReader, Steps
from router.metrics import MetricsRoute, RouterStats
from router.rank_health import RankHealth

_FRESH = 1.5  # seconds for which one look serves all visitors
_MAX_WAITING_BYTES = 4096
_MAX_LISTED = 3
STATES = (
    *("open", "awaiting_reward", "finalized", "leased", "trained"),
    *("rejected", "evaluated", "expired", "aborted"),
)
"""The states of sessions in the order of their lives."""


@dataclass(frozen=True, slots=True)
class Group:
    """A group that waits for members."""

    group_id: str
    members: int
    size: int
    closes_in: float


@dataclass(frozen=True, slots=True)
class Overview:
    parts: Sequence[Part]
    sessions: Mapping[str, Mapping[str, int]]
    """Sessions by mode and state."""
    slots: Mapping[str, int]
    """Slots of train sessions: `limit`, `admitted`, `reserved`, `waiting`."""
    groups: Sequence[Group]
    calls_rate: float | None
    tokens_rate: float | None
    version: int | None
    requests_running: int
    steps: Steps
    since_step: Mapping[str, Any]
    """`reward` (the mean, None without any) of all `sessions` that came since the last step, and
    how many of them were `dull`: all of their group scored alike."""
    waiting: str
    """The condition that the trainer has been waiting for, after a minute."""
    why: str
    """Why the next step, or agents, wait at this moment; "" if nothing does."""
    alarms: Sequence[Alarm]
    missing: Sequence[int]
    """The ranks that gave no figures: their sessions, slots and rates are missing."""

    def plain(self) -> dict[str, Any]:
        """Return it as plain data: of the steps the last one, and the mean times of the latest."""
        out = {field.name: getattr(self, field.name) for field in fields(self)}
        out |= {name: list(map(asdict, out[name])) for name in ("groups", "alarms")}
        out["parts"] = [asdict(part) | {"well": part.well} for part in self.parts]
        del out["steps"]
        return out | {"step": self.steps.last, "phases": self.steps.phases()}


class OverviewReader:
    """Looks at all parts of a run."""

    def __init__(
        self,
        run_dir: RunDir,
        metrics: MetricsRoute,
        health: RankHealth,
        ranks: RankReader,
        stats: RouterStats,
        steps: StepReader,
    ) -> None:
        self._waiting = run_dir.waiting
        self._metrics = metrics
        self._health = health
        self._ranks = ranks
        self._stats = stats
        self._steps = steps
        self._rates = Rates()
        self._lock = asyncio.Lock()
        self._latest: Overview | None = None
        self._at = 0.0

    async def read(self, visitor: Visitor) -> Overview:
        """Return the present state; the operator's, as it shows all tenants' sessions."""
        async with self._lock:
            if self._latest is None or time.monotonic() - self._at > _FRESH:
                self._latest = await self._look(visitor)
                self._at = time.monotonic()
            return self._latest

    async def _look(self, visitor: Visitor) -> Overview:
        texts, capacity = await asyncio.gather(
            self._metrics.scrape(), self._ranks.capacity(visitor)
        )
        return await asyncio.to_thread(self._combine, texts, capacity)

    def _combine(
        self, texts: Mapping[str, str | None], capacity: Mapping[int, dict[str, Any]]
    ) -> Overview:
        samples = {part: Samples(text) for part, text in texts.items() if text is not None}
        counters = {}
        for part, found in samples.items():
            counters[f"{part} calls"] = found.sum("calls_total")
            counters[f"{part} tokens"] = found.sum("output_tokens_total")
        rates = self._rates.add(counters)
        parts = self._parts(samples, rates)
        steps = self._steps.read()
        versions = [part.version for part in parts if part.version is not None]
        names = ("limit", "admitted", "reserved", "waiting")
        slots = {
            name: int(sum(found.sum(f"slots_{name}") for found in samples.values()))
            for name in names
        }
        waiting = _waiting_text(self._waiting, steps)
        sessions, groups = _sessions(samples.values()), _groups(capacity)
        since = since_step(samples.get("trainer"))
        return Overview(
            parts=parts,
            sessions=sessions,
            slots=slots,
            groups=groups,
            calls_rate=_total(rates, "calls"),
            tokens_rate=_total(rates, "tokens"),
            version=min(versions) if versions else None,
            requests_running=self._stats.running,
            steps=steps,
            since_step=since,
            waiting=waiting,
            why=why_waiting(parts, sessions, slots, groups),
            alarms=alarms_of(parts, samples, slots, steps, waiting, since, self._clocks()),
            missing=[r for r in self._health.fleet.ranks if rank_name(r) not in samples],
        )

    def _clocks(self) -> dict[int, float]:
        clocks = self._ranks.clocks
        return {rank: clocks[rank] for rank in self._health.fleet.ranks if rank in clocks}

    def _parts(self, samples: Mapping[str, Samples], rates: Mapping[str, float]) -> list[Part]:
        parts = [Part("router", "ready")]
        for rank in self._health.fleet.ranks:
            name = rank_name(rank)
            entry, found = self._health.entry(rank), samples.get(name)
            if entry is None or not self._health.url(rank):
                parts.append(Part(name, "away", entry.version if entry else None))
                continue
            limit = int(found.sum("calls_limit")) if found else None
            parts.append(
                Part(
                    name,
                    self._state(rank, entry),
                    entry.version,
                    entry.load.open,
                    entry.load.waiting,
                    entry.load.calls,
                    limit,
                    rates.get(f"{name} calls"),
                    rates.get(f"{name} tokens"),
                )
            )
        if (trainer := self._health.trainer) is not None:
            parts.append(Part("trainer", self._trainer_state(trainer, "trainer" in samples)))
        return parts

    def _state(self, rank: int, entry: RegistryEntry) -> str:
        if self._health.stalled(rank):
            return "stalled"
        if not entry.engine_up:
            return "no engine"
        if entry.store_full or entry.disk_full:
            return "disk full"
        place = self._health.fleet.state(rank)
        return entry.state if place in ("serving", None) else place

    def _trainer_state(self, entry: RegistryEntry, answers: bool) -> str:
        if entry.state == "stopping":
            return "done"
        if entry.disk_full:
            return "disk full"
        if entry.state == "starting":
            return "starting"
        return "ready" if answers or self._health.trainer_alive else "away"


def _sessions(samples: Any) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for found in samples:
        for labels, value in found.each("sessions"):
            states = out.setdefault(labels.get("mode", ""), dict.fromkeys(STATES, 0))
            state = labels.get("state", "")
            states[state] = states.get(state, 0) + int(value)
    return dict(sorted(out.items(), reverse=True))


def _groups(capacity: Mapping[int, dict[str, Any]]) -> list[Group]:
    found = [
        Group(str(g["group_id"]), int(g["members"]), int(g["size"]), float(g["closes_in"]))
        for slots in capacity.values()
        for g in slots.get("unfilled", ())
    ]
    return sorted(found, key=lambda group: group.closes_in)[:8]


def since_step(trainer: Samples | None) -> dict[str, Any]:
    """Return the figures of all sessions since the last step, from the trainer's metrics."""
    if trainer is None:
        return {"reward": None, "sessions": 0, "dull": 0}
    count = int(trainer.sum("train_since_step_sessions"))
    return {
        "reward": trainer.sum("train_since_step_reward_mean") if count else None,
        "sessions": count,
        "dull": int(trainer.sum("train_since_step_sessions", dull="true")),
    }


def why_waiting(
    parts: Sequence[Part],
    sessions: Mapping[str, Mapping[str, int]],
    slots: Mapping[str, int],
    groups: Sequence[Group],
) -> str:
    """Return why the next step, or agents, wait at this moment; "" if nothing does."""
    trainer = next((part for part in parts if part.name == "trainer"), None)
    if trainer is None or trainer.state == "done":
        return ""
    if trainer.state == "starting":
        return "for the trainer, which loads its model"
    counts = sessions.get("train", {})
    reasons = []
    if groups:
        listed = [f"{group.group_id} ({group.members} of {group.size})" for group in groups]
        more = ", ..." if len(listed) > _MAX_LISTED else ""
        reasons.append(f"for members of group {', '.join(listed[:_MAX_LISTED])}{more}")
    if awaiting := counts.get("awaiting_reward", 0):
        reasons.append(f"for the rewards of {awaiting} sessions")
    if opens := slots["waiting"]:
        reasons.append(f"for slots, {opens} opens")
    if not (reasons or counts.get("open") or counts.get("finalized") or counts.get("leased")):
        reasons.append("for agents: no session is open")
    return "; ".join(reasons)


def _total(rates: Mapping[str, float], what: str) -> float | None:
    found = [value for name, value in rates.items() if name.endswith(f" {what}")]
    return sum(found) if found else None


def _waiting_text(path: Path, steps: Steps) -> str:
    """Return what the trainer waits for; "" if a step has been made since it was written."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_WAITING_BYTES).decode(errors="replace").strip()
        written = path.stat().st_mtime
    except OSError:
        return ""
    last = steps.last
    made = last.get("time") if last else None
    return "" if isinstance(made, int | float) and made > written else text
