"""The results of `any-agent run` as a table, as JSON and as an exit code."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from any_agent.runtime.command_line import printable
from any_agent.sdk.program.run import UNUSABLE, ProgramGroup, ProgramRun

ALL_FINALIZED, SOME_FAILED, WRONG_INPUT, NO_SERVICE, INTERRUPTED = 0, 1, 2, 3, 130

_COLUMNS = ("RUN", "SESSION", "STATE", "REWARD", "CALLS", "EXIT", "SECONDS", "NOTE")
_MAX_NOTE = 100


def exit_code(runs: ProgramGroup) -> int:
    """Return the exit code of runs that were not interrupted; see docs/how-to/run.md."""
    if runs.stopped is not None:
        return NO_SERVICE if isinstance(runs.stopped, UNUSABLE) else WRONG_INPUT
    finalized = all(run.state == "finalized" for run in runs.results)
    return ALL_FINALIZED if finalized else SOME_FAILED


def table(results: Sequence[ProgramRun]) -> str:
    """Return a line for each run, and a summary."""
    rows = [_COLUMNS, *map(_row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, summary(results)])


def summary(results: Sequence[ProgramRun]) -> str:
    """Return how many runs are finalized, and their mean reward."""
    finalized = [run for run in results if run.state == "finalized"]
    mean = mean_reward(results)
    text = f"{len(finalized)} of {len(results)} finalized"
    return text if mean is None else f"{text}, mean reward {mean:.4g}"


def mean_reward(results: Sequence[ProgramRun]) -> float | None:
    """Return the mean over the finalized runs with a final reward; None without any."""
    rewards = [run.reward for run in results if run.reward is not None]
    return math.fsum(rewards) / len(rewards) if rewards else None


def as_json(runs: ProgramGroup, code: int) -> str:
    """Return all results as JSON."""
    results, options = runs.results, runs.options
    report: dict[str, Any] = {
        "exit_code": code,
        "url": options.service.url,
        "mode": options.mode,
        "task_id": options.task_id,
        "group_id": runs.group_id,
        "finalized": sum(run.state == "finalized" for run in results),
        "mean_reward": mean_reward(results),
        "stopped": runs.stopped.message if runs.stopped is not None else None,
        "runs": [asdict(run) for run in results],
    }
    return json.dumps(report, indent=2) + "\n"


def _row(run: ProgramRun) -> tuple[str, ...]:
    return (
        str(run.run),
        run.session_id or "-",
        run.state,
        _number(run.reward),
        "-" if run.calls is None else str(run.calls),
        "-" if run.exit_code is None else str(run.exit_code),
        "-" if run.seconds is None else f"{run.seconds:.1f}",
        printable(run.error or "")[:_MAX_NOTE],
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
