"""What people see of a run: a line for every step and every evaluation that the trainer reports."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


class TrainingProgress:
    """Reads `metrics.jsonl` as it grows; what was there before is not shown.

    With ``waiting`` also what the trainer waits for, whenever it says so there: one in another
    process, whose words nobody sees otherwise.
    """

    def __init__(self, metrics: Path, steps: int, waiting: Path | None = None) -> None:
        self._metrics = metrics
        self._steps = steps
        self._waiting = waiting
        self._waited = _written(waiting)
        self._offset = metrics.stat().st_size if metrics.exists() else 0
        self.step = 0
        """The last step shown."""

    def new_lines(self) -> list[str]:
        """What is new since the last call."""
        return [*self._reports(), *self._waits()]

    def _waits(self) -> list[str]:
        written = _written(self._waiting)
        if self._waiting is None or written == self._waited:
            return []
        self._waited = written
        return self._waiting.read_text(encoding="utf-8").splitlines()

    def _reports(self) -> list[str]:
        """A line for each; one half-written is left for the next time.

        What a trainer that died left of one is no line.
        """
        if not self._metrics.exists():
            return []
        with open(self._metrics, "rb") as file:
            file.seek(self._offset)
            *lines, rest = file.read().split(b"\n")
            self._offset = file.tell() - len(rest)
        shown = []
        for line in lines:
            with suppress(json.JSONDecodeError):
                shown.append(self._show(json.loads(line)))
        return shown

    def _show(self, line: dict[str, Any]) -> str:
        if "eval" in line:
            return shown_evaluation(line)
        seconds = line["seconds"]
        self.step = int(line["step"])
        left_out = line.get("left_out") or {}
        why = "".join(f"  left out {count} ({reason})" for reason, count in left_out.items())
        return (
            f"step      {self.step:3d}/{self._steps}  reward {line['reward']:.3f}  "
            f"version {line['version']}  staleness {line['staleness_mean']:.2f}  "
            f"wait {seconds['wait']:.2f} s  train {seconds['train']:.2f} s"
            f"{why}"
        )


def _written(path: Path | None) -> int:
    """When; 0 for never."""
    return path.stat().st_mtime_ns if path is not None and path.exists() else 0


def shown_evaluation(line: dict[str, Any]) -> str:
    """An evaluation's line of `metrics.jsonl`, for people."""
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
