"""What people see of a run: a line for every step and every evaluation that the trainer reports."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


class Progress:
    """Reads `metrics.jsonl` as it grows; what was there before is not shown."""

    def __init__(self, metrics: Path, steps: int) -> None:
        self._metrics = metrics
        self._steps = steps
        self._offset = metrics.stat().st_size if metrics.exists() else 0
        self.step = 0
        """The last step shown."""

    def new_lines(self) -> list[str]:
        """One for each report since the last call; a line half-written is left for the next.

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
            return _evaluation(line)
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


def _evaluation(line: dict[str, Any]) -> str:
    found = line["eval"]
    low, high = found["ci95"]
    failed = f"  {found['failed']} failed" if found["failed"] else ""
    return (
        f"eval      step {line['step']}  reward {found['reward']:.3f}  95 % in {low:.3f} to "
        f"{high:.3f}  {found['episodes']} episodes{failed}  {found['seconds']:.1f} s"
    )
