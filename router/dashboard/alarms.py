"""Alarms: the faults of a run in words, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from router.dashboard.chart import number_text
from router.dashboard.scrape import Samples
from router.dashboard.training import Steps, dull_sessions

_MISMATCH = 0.01  # nats; the same bound as in docs/reference/metrics.md
_DULL = 0.5  # share of sessions whose groups scored alike
_RECENT = 5
_FULL_SOON = 3600.0  # seconds
_CLOCK_OFF = 60.0  # seconds
_MIN_SCORED = 20  # sessions since a step that say how the next ones will be
_OTHER_TASKS = (
    "The tasks are too easy or too hard for this model: mix in others, or grade finer. "
    "docs/how-to/troubleshoot.md has more."
)


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the run."""

    name: str
    state: str
    """`ready`, `stopping`, `stalled`, `no engine`, `disk full` or `away`; the trainer also
    `starting` or `done`."""
    version: int | None = None
    open: int | None = None
    waiting: int | None = None
    calls: int | None = None
    calls_limit: int | None = None
    calls_rate: float | None = None
    tokens_rate: float | None = None

    @property
    def well(self) -> bool:
        return self.state in ("ready", "starting", "done")


@dataclass(frozen=True, slots=True)
class Alarm:
    level: Literal["bad", "warn"]
    what: str
    do: str


def alarms_of(
    parts: Sequence[Part],
    samples: Mapping[str, Samples],
    slots: Mapping[str, int],
    steps: Steps,
    waiting: str,
    since_step: Mapping[str, Any],
    clocks: Mapping[int, float],
) -> list[Alarm]:
    """Return the alarms of a run, the worst first."""
    found = [
        *_of_parts(parts),
        *_of_stores(samples),
        *_of_disks(samples),
        *_of_waits(parts, slots, waiting),
        *_of_clocks(clocks),
    ]
    if any(part.name == "trainer" and part.state != "done" for part in parts):
        found += _of_training(steps, since_step)
    return sorted(found, key=lambda alarm: alarm.level != "bad")


_STATES: Mapping[str, tuple[Literal["bad", "warn"], str, str]] = {
    "away": (
        "bad",
        "does not answer",
        "It is started again by itself. If it stays away, logs/{name}.log in the trial's folder "
        "has the reason.",
    ),
    "stalled": (
        "bad",
        "takes connections but has sent no heartbeat for seconds",
        "Its machine is overloaded, or its disk hangs: look at the load there.",
    ),
    "no engine": (
        "bad",
        "has no engine that answers: its calls wait for one",
        "An engine of ours is started again by itself; logs/engine-*.log in the trial's folder has "
        "the reason.",
    ),
    "disk full": (
        "bad",
        "has no room left on its disk",
        "Free some space: it goes on by itself, and nothing acknowledged is lost.",
    ),
    "stopping": ("warn", "is stopping", "It finishes what is under way and takes nothing new."),
}


def _of_parts(parts: Sequence[Part]) -> Iterator[Alarm]:
    for part in parts:
        if part.state in _STATES:
            level, what, do = _STATES[part.state]
            name = part.name.replace("rank-", "Rank ").replace("trainer", "The trainer")
            yield Alarm(level, f"{name} {what}.", do.format(name=part.name))


def _of_stores(samples: Mapping[str, Samples]) -> Iterator[Alarm]:
    for name, found in samples.items():
        if found.sum("journal_log_away"):
            yield Alarm(
                "bad",
                f"The journal of {name} cannot write to its Redis.",
                "Calls get 503 until it answers: look at server.journal's Redis.",
            )
        if damaged := int(found.sum("journal_damaged_total")):
            yield Alarm(
                "warn",
                f"{damaged} sessions of {name} were ended because their record was damaged.",
                "Check the disk of the journals; the log names the sessions.",
            )
        if removed := int(found.sum("archive_removed_sessions_total", limit="default")):
            yield Alarm(
                "warn",
                f"{removed} archived sessions of {name} were removed, the oldest: archives had a "
                "quarter of the disk.",
                "Set sessions.archive_bytes to what you want to keep; any-agent export copies them "
                "before.",
            )
        if failures := int(found.sum("train_tracker_failures_total")):
            yield Alarm(
                "warn",
                f"A tracker has failed {failures} times.",
                "It is tried again and gets what it lacks; the trainer's log has the reason.",
            )


def _of_disks(samples: Mapping[str, Samples]) -> Iterator[Alarm]:
    """Tell of each disk once, whichever ranks share it: by the first of those that see it fill."""
    soon: dict[str, tuple[float, float, list[str]]] = {}
    for name, found in samples.items():
        for labels, seconds in found.each("disk_full_in_seconds"):
            disk, free = labels.get("disk", ""), found.sum("disk_free_bytes", **labels)
            if seconds < _FULL_SOON:
                first, least, names = soon.get(disk, (seconds, free, []))
                soon[disk] = (min(first, seconds), min(least, free), [*names, name])
    for disk, (seconds, free, names) in soon.items():
        which = "of the run" if disk == "run" else f"with the journal of {', '.join(names)}"
        minutes = max(1, round(seconds / 60))
        yield Alarm(
            "bad",
            f"The disk {which} will be full in {minutes} minutes, if it goes on filling as in the "
            f"last hour: {free / 1e6:,.0f} MB are free.",
            "Free some space, or keep less: train.keep_checkpoints, sessions.keep_hours, "
            "sessions.archive_bytes. When it is full writes get 507, and nothing is lost.",
        )


def _of_waits(parts: Sequence[Part], slots: Mapping[str, int], waiting: str) -> Iterator[Alarm]:
    trainer = next((part for part in parts if part.name == "trainer"), None)
    # The lines begin with the word that heads them on the console; others are no alarm.
    waits = [line for line in waiting.splitlines() if line.startswith("waiting")]
    if waits and trainer is not None and trainer.state not in ("starting", "done"):
        lines = [line.removeprefix("waiting").strip() for line in waits]
        yield Alarm(
            "warn",
            f"The trainer is waiting: {'. '.join(line.rstrip('.') for line in lines)}.",
            "Before the first agent calls this is as it should be. Afterwards: are there agents, "
            "rewards and whole groups? `any-agent sessions list` shows them.",
        )
    if slots.get("waiting", 0) and trainer is not None and not trainer.well:
        yield Alarm(
            "bad",
            f"{slots['waiting']} opens wait for slots, which the trainer gives.",
            "They go on when the trainer is back.",
        )


def _of_clocks(clocks: Mapping[int, float]) -> Iterator[Alarm]:
    for rank, ahead in sorted(clocks.items()):
        if abs(ahead) > _CLOCK_OFF:
            which = "ahead of" if ahead > 0 else "behind"
            yield Alarm(
                "warn",
                f"The clock of rank {rank} is {abs(ahead) / 60:,.0f} minutes {which} the router's.",
                "Set both by NTP: the ages of that rank's sessions are wrong by as much.",
            )


def _of_training(steps: Steps, since_step: Mapping[str, Any]) -> Iterator[Alarm]:
    # The last steps, too: by the sessions since one the alarm would go on and off.
    left, trained = dull_sessions(steps.steps[-_RECENT - 1 :])
    dull, scored = left + since_step["dull"], left + trained + since_step["sessions"]
    if scored >= _MIN_SCORED and dull / scored > _DULL:
        yield Alarm(
            "warn",
            f"{dull} of the last {scored} sessions taught nothing: all of their group scored "
            "alike.",
            _OTHER_TASKS,
        )
    if steps.last is not None:
        yield from _of_mismatch(steps.steps[-_RECENT:])


def _of_mismatch(steps: Sequence[Mapping[str, Any]]) -> Iterator[Alarm]:
    """Compare on the latest tokens of a step's own weights; on all only where there are no such."""
    fresh = next((line for line in reversed(steps) if "mismatch_fresh" in line), None)
    line = steps[-1] if fresh is None else fresh
    mismatch = line.get("mismatch" if fresh is None else "mismatch_fresh")
    if not isinstance(mismatch, int | float) or mismatch <= _MISMATCH:
        return
    amount = f"mismatch {number_text(mismatch)} nats in step {line['step']}"
    if fresh is None:
        yield Alarm(
            "warn",
            f"Engine and trainer may disagree: {amount}, whose tokens are all older than its "
            "weights.",
            "The steps since then explain some of it, most at a high train.lr. Else run any-agent "
            "doctor on this model and engine.",
        )
    else:
        yield Alarm(
            "warn",
            f"Engine and trainer disagree about the same weights: {amount}.",
            "Run any-agent doctor on this model and engine.",
        )
