"""The other trials of a run's experiment, to be compared with it, and what serves its weights."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from any_agent.rundir.layout import RunDir, checkpoint_problem, saved_steps
from router.dashboard.training import StepReader, Steps

_MOST = 3
"""Other trials in one chart."""
_LISTED = 20
_CHECKPOINTS = 5


@dataclass(frozen=True, slots=True)
class Choice:
    """A trial that can be drawn beside the run."""

    name: str
    chosen: bool
    link: str | None
    """The names that are drawn after a click on it, by commas; None where there is no room."""


def trials_beside(run: RunDir, asked: str) -> tuple[list[Choice], dict[str, Steps]]:
    """Return the experiment's other trials that have made a step, the latest first, and the steps
    of those that ``asked`` names, by commas. Names of no trial are passed over."""
    others = _others(run)
    names = set(asked.split(","))
    chosen = [name for name in others if name in names][:_MOST]
    choices = [Choice(name, name in chosen, _toggled(chosen, name)) for name in others]
    folder = run.path.parent
    return choices, {name: _reader(_metrics(folder / name)).read() for name in chosen}


@lru_cache(maxsize=16)
def _reader(path: Path) -> StepReader:
    # Kept, because it reads a file again only after a change, and the page asks every few seconds.
    return StepReader(path)


def _toggled(chosen: list[str], name: str) -> str | None:
    if name in chosen:
        return ",".join(each for each in chosen if each != name)
    return ",".join([*chosen, name]) if len(chosen) < _MOST else None


def _others(run: RunDir) -> list[str]:
    found: list[tuple[float, str]] = []
    for folder in _folders(run.path.parent):
        # A name with a comma could not be chosen; `trial` accepts none.
        if folder != run.path and "," not in folder.name:
            with suppress(OSError):
                found.append((_metrics(folder).stat().st_mtime, folder.name))
    return [name for _, name in sorted(found, reverse=True)[:_LISTED]]


def serve_commands(run: RunDir) -> list[tuple[int, str]]:
    """Return the latest complete checkpoints' steps, newest first, with what serves each.

    Each is served as a trial of its own: one that has checkpoints serves the latest of these.
    """
    found = sorted(saved_steps(run.checkpoints).items(), reverse=True)[:_CHECKPOINTS]
    lines = []
    for step, folder in found:
        # The trainer may remove it meanwhile.
        with suppress(OSError):
            if checkpoint_problem(folder) is None:
                trial = f"{run.path.name[:40]}-step-{step}"
                named = f"--experiment served --trial {trial}"
                model = shlex.quote(str(folder))
                lines.append((step, f"any-agent serve --no-train {named} --model {model}"))
    return lines


def _folders(parent: Path) -> list[Path]:
    try:
        return list(parent.iterdir())
    except OSError:
        return []


def _metrics(folder: Path) -> Path:
    return RunDir(folder).metrics
