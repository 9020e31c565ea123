"""Train the tiny tasks from some seeds each, and check that they are learned."""

from __future__ import annotations

from pathlib import Path

from benchmarks.learning.runs import TASKS, Figures, prepare, train

GAIN = 0.25
SECONDS = 180.0
SHARE = 0.8
HEAD = "task          seed  before   after    gain  steps  seconds      CPU"


def learned(figures: Figures) -> bool:
    """Enough, and in time; on a machine that others use, in so much time of one core."""
    return figures.gain >= GAIN and min(figures.seconds, figures.cpu_seconds) < SECONDS


def learn_tasks(folder: Path, seeds: int) -> bool:
    """Train every task from each of the seeds; prints a table, and whether it is good."""
    print(HEAD, flush=True)
    good = True
    for task in TASKS:
        well = sum(_learns(folder / f"{task}-{seed}", task, seed) for seed in range(seeds))
        print(f"learned   {task}: {well} of {seeds} gain {GAIN} or more in {SECONDS:g} s")
        good &= well >= SHARE * seeds
    return good


def _learns(folder: Path, task: str, seed: int) -> bool:
    try:
        prepare(folder, task, seed)
        figures = train(folder, task, seed)
    except AssertionError as error:
        print(f"{task:<12}{seed:>6}  {error}", flush=True)
        return False
    print(
        f"{task:<12}{seed:>6}{figures.before:>8.3f}{figures.after:>8.3f}{figures.gain:>+8.3f}"
        f"{figures.steps:>7}{figures.seconds:>9.1f}{figures.cpu_seconds:>9.1f}",
        flush=True,
    )
    return learned(figures)
