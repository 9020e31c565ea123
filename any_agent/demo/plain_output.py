"""The demo as lines of plain text: for files, pipes and terminals that cannot draw."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from any_agent.demo.report import Report
from any_agent.demo.state import DemoState, Step


class PlainOutput:
    """Prints what is new in the state that ``look`` gives, when told that it changed."""

    def __init__(self, look: Callable[[], DemoState], out: TextIO | None = None) -> None:
        self._look = look
        self._out = out or sys.stdout
        self._shown: DemoState | None = None

    def __enter__(self) -> Self:
        self.changed()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def say(self, line: str) -> None:
        """The launcher's lines."""
        print(line, file=self._out, flush=True)

    def changed(self) -> None:
        now = self._look()
        for line in news(self._shown, now):
            self.say(line)
        self._shown = now

    def end(self, report: Report) -> None:
        for line in summary(report):
            self.say(line)


def news(before: DemoState | None, now: DemoState) -> list[str]:
    """Lines for what a state has and an earlier one had not."""
    out = []
    if before is None:
        out.append(_line("demo", f"seed {now.seed}, files in {now.folder}"))
    if before is None or before.phase != now.phase:
        out.append(_line("now", now.phase))
    known = {step.number for step in before.history} if before else set()
    out += [_step(step, now.steps) for step in now.history if step.number not in known]
    for name in ("before", "after"):
        measures = getattr(now, name)
        if measures is not None and (before is None or getattr(before, name) is None):
            out.append(_line(name, f"first answer right: {measures.accuracy:.1%}"))
    return out


def summary(report: Report) -> list[str]:
    """What the demo came to, and what to type next."""
    out = ["", f"{report.title:<38}{'before':>8}{'after':>8}"]
    out += [f"{label:<38}{before:>8}{after:>8}" for label, before, after in report.rows()]
    out.append("")
    if report.rewards:
        first, last = report.rewards[0], report.rewards[-1]
        out.append(_line("reward", f"{first:.3f} to {last:.3f} in {len(report.rewards)} steps"))
    out += [_line(label, text) for label, text in report.facts()]
    for title, commands in report.next:
        out += ["", title, *(f"    {command}" for command in commands)]
    return out


def _line(label: str, text: str) -> str:
    return f"{label:<9} {text}"


def _step(step: Step, steps: int) -> str:
    return _line(
        "step",
        f"{step.number:3d}/{steps}  reward {step.reward:.3f}  version {step.version}  "
        f"staleness {step.staleness:.2f}  wait {step.wait:.2f} s  train {step.train:.2f} s",
    )
