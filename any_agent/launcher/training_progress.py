"""Console lines for the trainer's steps, evaluations and waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from any_agent.runtime.log_tail import LogTail, records_in

_STEP_PHASES = ("pack", "forward", "backward", "optimizer")


class TrainingProgress:
    """Formats the new lines of `metrics.jsonl`.

    ``waiting`` is the file in which a trainer in another process describes what it waits for; its
    text is returned after each write.
    """

    def __init__(self, metrics: Path, steps: int, waiting: Path | None = None) -> None:
        self._metrics = LogTail(metrics)
        self._steps = steps
        self._waiting = waiting
        self._read_at = _modified(waiting)
        earlier = [line for line in records_in(metrics) if "eval" not in line]
        self._before: dict[str, Any] = earlier[-1] if earlier else {}
        self.step = 0
        """The last step that was formatted."""

    def new_lines(self) -> list[str]:
        """Return the lines since the last call."""
        return [*map(self._format, self._metrics.new_records()), *self._waits()]

    def _waits(self) -> list[str]:
        modified = _modified(self._waiting)
        if self._waiting is None or modified in (0, self._read_at):
            return []
        self._read_at = modified
        return self._waiting.read_text(encoding="utf-8").splitlines()

    def _format(self, line: dict[str, Any]) -> str:
        if "eval" in line:
            return format_evaluation(line)
        self.step = int(line["step"])
        before, self._before = self._before, line
        return format_step(line, self._steps, before)


def _modified(path: Path | None) -> int:
    """Return the modification time in ns; 0 without a file."""
    return path.stat().st_mtime_ns if path is not None and path.exists() else 0


def format_step(line: dict[str, Any], steps: int, before: Mapping[str, Any]) -> str:
    """Format a step's line of `metrics.jsonl`, of so many steps, for the console.

    ``before`` is the line of the step before it, empty for the first one.
    """
    seconds = line["seconds"]
    train = sum(seconds.get(phase, 0.0) for phase in _STEP_PHASES)
    counts = sessions_left_out(before, line).items()
    why = "".join(f"  left out {count} ({reason})" for reason, count in counts)
    return (
        f"step      {line['step']:3d}/{steps}  reward {line['reward']:.3f}"
        f"{all_before(line)}  version {line['version']}  staleness {line['staleness_mean']:.2f}  "
        f"wait {seconds['wait']:.2f} s  train {train:.2f} s"
        f"{why}"
    )


def all_before(line: Mapping[str, Any]) -> str:
    """Return what follows a step's reward: that of all sessions since the step before, or ""."""
    text = describe_all(line.get("all") or {})
    return f" (since the step before: {text})" if text else ""


def describe_all(found: Mapping[str, Any]) -> str:
    """Describe the reward of all sessions since a step, as `all` of a step's line has it; ""
    without any."""
    if found.get("reward") is None:
        return ""
    text = f"{found['reward']:.3f} over {found['sessions']} sessions"
    return text + (f", {found['dull']} taught nothing" if found["dull"] else "")


def sessions_left_out(before: Mapping[str, Any], line: Mapping[str, Any]) -> Counter[str]:
    """Return how many sessions were left out since the step before, by reason: when they came, or
    of the step's own batch."""
    earlier, now = (_counts(one, "rejected") for one in (before, line))
    # `rejected` counts since the trainer's start, which may lie between the two.
    since = now if earlier - now else now - earlier
    return since + _counts(line, "left_out")


def _counts(line: Mapping[str, Any], name: str) -> Counter[str]:
    found = line.get(name)
    return Counter(found) if isinstance(found, dict) else Counter()


def format_evaluation(line: dict[str, Any]) -> str:
    """Format an evaluation's line of `metrics.jsonl` for the console."""
    found = line["eval"]
    parts = [f"eval      step {line['step']:3d}"]
    parts.append("no reward" if found["reward"] is None else f"reward {found['reward']:.3f}")
    if found["ci95"] is not None:
        low, high = found["ci95"]
        parts.append(f"95 % in {low:.3f} to {high:.3f}")
    if found["episodes"] > found["items"]:
        parts.append(f"best {found['best']:.3f}")
    parts.append(f"{found['items']} items")
    parts += [f"left out {count} ({reason})" for reason, count in found["failed"].items()]
    return "  ".join([*parts, f"{found['seconds']:.1f} s"])
