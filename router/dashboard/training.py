"""The steps of a run, as the end of `metrics.jsonl` has them, and their charts."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from any_agent.launcher.training_progress import sessions_left_out
from router.dashboard.chart import Chart, draw

MAX_BYTES = 4 << 20
_MAX_NAMED = 4  # lines that a chart has colours for
_RECENT = 10
"""Steps whose times are averaged: one step alone is too noisy."""
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Steps:
    """The lines of a run that were read."""

    steps: Sequence[Record] = ()
    evaluations: Sequence[Record] = ()
    whole: bool = True
    """False if the file is so long that its first lines were not read."""

    @property
    def last(self) -> Record | None:
        return self.steps[-1] if self.steps else None

    def phases(self) -> dict[str, float]:
        """Return the mean seconds of each phase of the latest steps, the longest first."""
        recent = [line.get("seconds") for line in self.steps[-_RECENT:]]
        known = [seconds for seconds in recent if isinstance(seconds, dict)]
        names = dict.fromkeys(name for seconds in known for name in seconds)
        means = {n: sum(s.get(n, 0.0) for s in known) / len(known) for n in names}
        return dict(sorted(means.items(), key=lambda item: -item[1]))


class StepReader:
    """Reads a run's steps; a file that has not changed is not read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._steps = Steps()

    def read(self) -> Steps:
        """Return the steps; it takes some milliseconds, so call it in a thread."""
        try:
            with open(self._path, "rb") as file:
                now = os.fstat(file.fileno())
                stamp = (now.st_mtime_ns, now.st_size)
                if stamp != self._stamp:
                    start = max(0, now.st_size - MAX_BYTES)
                    file.seek(start)
                    self._steps = parse_steps(file.read(MAX_BYTES), whole=start == 0)
                    self._stamp = stamp
        except OSError:
            return Steps()
        return self._steps


def parse_steps(content: bytes, *, whole: bool) -> Steps:
    """Parse lines; of a step that was made again after a resume the later one counts."""
    lines = content.split(b"\n")
    steps: dict[int, Record] = {}
    evaluations: dict[int, Record] = {}
    for line in lines if whole else lines[1:]:
        try:
            record = orjson.loads(line)
            step = int(record["step"])
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            # The last line may be half-written.
            continue
        (evaluations if "eval" in record else steps)[step] = record
    return Steps(_in_order(steps), _in_order(evaluations), whole)


def _in_order(records: dict[int, Record]) -> list[Record]:
    return [records[step] for step in sorted(records)]


def _field(*path: str) -> Callable[[Record], Any]:
    def get(record: Any) -> Any:
        for name in path:
            record = record.get(name) if isinstance(record, dict) else None
        return record

    return get


def dull_sessions(lines: Sequence[Record]) -> tuple[int, int]:
    """Return how many sessions the steps after the first line left out because their group scored
    alike, and how many they were trained on."""
    pairs = list(itertools.pairwise(lines))
    left = sum(sessions_left_out(before, line)["zero_variance"] for before, line in pairs)
    return left, sum(line.get("sessions") or 0 for _, line in pairs)


def _dull_share(line: Record) -> float | None:
    """Return the share of the sessions since the step before whose groups teach nothing."""
    sessions, dull = _field("all", "sessions")(line), _field("all", "dull")(line)
    return dull / sessions if sessions and isinstance(dull, int) else None


_Series = tuple[str, str, dict[str, Callable[[Record], Any]]]
_REWARD: _Series = ("Reward", "mean score of a step's sessions", {"train": _field("reward")})
_CHARTS: Sequence[_Series] = (
    ("All alike", "share of sessions that teach nothing", {"share": _dull_share}),
    ("Loss", "policy loss", {"loss": _field("loss")}),
    ("Entropy", "nats, at trained tokens", {"entropy": _field("entropy")}),
    (
        "Mismatch",
        "engine against trainer, nats",
        {"mean": _field("mismatch"), "same weights": _field("mismatch_fresh")},
    ),
    (
        "Clipped tokens",
        "share of trained tokens",
        {"low": _field("clipped_low"), "high": _field("clipped_high")},
    ),
    (
        "Output length",
        "tokens of a call",
        {"mean": _field("lengths", "output", "mean"), "max": _field("lengths", "output", "max")},
    ),
    (
        "Turns",
        "calls of a session",
        {"mean": _field("lengths", "turns", "mean"), "max": _field("lengths", "turns", "max")},
    ),
    (
        "Staleness",
        "steps behind",
        {"mean": _field("staleness_mean"), "max": _field("staleness_max")},
    ),
    ("Gradient norm", "before clipping", {"norm": _field("grad_norm")}),
)


def charts_of(run: Steps, name: str = "", beside: Mapping[str, Steps] | None = None) -> list[Chart]:
    """Return the charts of a run's steps, none before the first step.

    With other runs ``beside`` it, each chart compares its first line with theirs, by name.
    """
    if not run.steps:
        return []
    if beside:
        return _compared({name: run, **beside})
    numbers = [int(line["step"]) for line in run.steps]
    charts = [_rewards(run), *_named_rewards(run, numbers)]
    for title, about, series in _CHARTS:
        lines = {name: [get(line) for line in run.steps] for name, get in series.items()}
        charts.append(draw(title, about, numbers, lines))
    return charts


def _compared(runs: Mapping[str, Steps]) -> list[Chart]:
    numbers = sorted({int(line["step"]) for run in runs.values() for line in run.steps})
    charts = []
    for title, about, series in [_REWARD, *_CHARTS]:
        first, get = next(iter(series.items()))
        lines = {}
        for name, run in runs.items():
            values = {int(line["step"]): get(line) for line in run.steps}
            lines[name] = [values.get(number) for number in numbers]
        charts.append(
            draw(title, f"{about}: {first}" if len(series) > 1 else about, numbers, lines)
        )
    return charts


def _rewards(run: Steps) -> Chart:
    """Return the chart of rewards, with the evaluations among the steps."""
    evaluated = {int(line["step"]): _field("eval", "reward")(line) for line in run.evaluations}
    trained = {int(line["step"]): line.get("reward") for line in run.steps}
    steps = sorted(trained.keys() | evaluated.keys())
    series = {"train": [trained.get(step) for step in steps]}
    if evaluated:
        series["eval"] = [evaluated.get(step) for step in steps]
    title, about, _ = _REWARD
    return draw(title, about, steps, series)


def _named_rewards(run: Steps, numbers: Sequence[int]) -> Iterator[Chart]:
    """Yield the chart of the named rewards that most steps have, if there are any."""
    named = [_field("rewards")(line) for line in run.steps]
    known = [rewards if isinstance(rewards, dict) else {} for rewards in named]
    usual = Counter(name for rewards in known for name in rewards).most_common(_MAX_NAMED)
    if usual:
        series = {name: [rewards.get(name) for rewards in known] for name, _ in usual}
        about = "mean of the sessions that have it, as it was given"
        yield draw("Rewards by name", about, numbers, series)


def table_of(run: Steps, size: int = 20) -> list[dict[str, Any]]:
    """Return the latest steps, newest first, as rows of a table."""
    rows = []
    # Of the oldest line that was read, what came before it is known only if it is the first one.
    pairs = list(itertools.pairwise([*([{}] if run.whole else run.steps[:1]), *run.steps]))
    for last, line in reversed(pairs[-size:]):
        seconds = line.get("seconds")
        rows.append(
            {
                "step": line["step"],
                "version": line.get("version"),
                "reward": line.get("reward"),
                "sessions": line.get("sessions"),
                "left_out": sessions_left_out(last, line).total(),
                "loss": line.get("loss"),
                "mismatch": line.get("mismatch"),
                "seconds": sum(seconds.values()) if isinstance(seconds, dict) else None,
            }
        )
    return rows
