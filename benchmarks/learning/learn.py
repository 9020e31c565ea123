"""Check that models learn: ``benchmarks/learning/learn.py [--seeds N] [--controls N] [--tasks N]``.

Runs `any-agent demo` for each seed, and its control, in which every session gets another session's
reward, for some. Prints a table; exit code 1 unless at least nine tenths of the seeds go from an
accuracy of at most 0.5 to at least 0.85 and the controls gain less than 0.1 on average.

Then trains on datasets, as a researcher's script does: sums with a second
try, and an agent with a tool. Of each, four of five seeds must gain 0.25 of reward in 3 minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.learning.seeds import learn_tasks

BEFORE, AFTER = 0.5, 0.85
SHARE = 0.9
CONTROL_GAIN = 0.1
CONTROL_STEPS = 12
"""A seed of the demo is past 0.85 by then. Noise for rewards may lead a policy to where all its
answers score the same, and then it has nothing more to learn from: later steps hardly come."""
HEAD = "          seed  before   after    gain  steps  seconds  peak MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check over many seeds that models learn.")
    parser.add_argument("--seeds", type=int, default=10, help="run seeds 0 .. N-1 (default 10)")
    parser.add_argument("--controls", type=int, default=5, help="controls 0 .. N-1 (default 5)")
    parser.add_argument("--tasks", type=int, default=5, help="seeds of each task (default 5)")
    parser.add_argument(
        "--steps",
        type=int,
        default=None,
        help=f"by default the demo's own number, and {CONTROL_STEPS} for a control",
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="any-agent-learn-") as folder:
        good = not (arguments.seeds or arguments.controls) or _demos(Path(folder), arguments)
        good &= not arguments.tasks or learn_tasks(Path(folder), arguments.tasks)
    print("verdict   " + ("it learns, and from the rewards" if good else "FAILED"))
    return 0 if good else 1


def _demos(folder: Path, arguments: argparse.Namespace) -> bool:
    print(HEAD, flush=True)
    runs = [_demo(folder, seed, arguments.steps) for seed in range(arguments.seeds)]
    controls = [
        _demo(folder, seed, arguments.steps or CONTROL_STEPS, "--permute-rewards")
        for seed in range(arguments.controls)
    ]
    learned = sum(run is not None and _learned(run) for run in runs)
    gains = [_gain(run) for run in controls if run is not None]
    print(f"learned   {learned} of {len(runs)} go from <= {BEFORE} to >= {AFTER}")
    if controls:
        # Noise for rewards is a random walk for the policy: one control may drift by a tenth or
        # two either way. A leak would show in their mean.
        mean = sum(gains) / max(1, len(gains))
        print(f"controls  mean gain {mean:+.3f}; it must be below {CONTROL_GAIN}")
    return (
        learned >= SHARE * len(runs)
        and len(gains) == len(controls)
        and sum(gains) < CONTROL_GAIN * max(1, len(gains))
    )


def _demo(folder: Path, seed: int, steps: int | None, *options: str) -> dict[str, Any] | None:
    """One run's figures, printed as a row; None if it failed."""
    kind = "control" if options else "demo"
    work = folder / f"{kind}-{seed}"
    figures = folder / f"{kind}-{seed}.json"
    command = [sys.executable, "-m", "any_agent.cli", "demo", "--seed", str(seed)]
    command += ["--json", str(figures), "--keep", str(work), *options]
    if steps is not None:
        command += ["--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{kind:<8}{seed:>6}  failed with exit code {done.returncode}:", flush=True)
        print("\n".join(f"    {line}" for line in done.stderr.splitlines()[-15:]), flush=True)
        return None
    run: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8"))
    print(
        f"{kind:<8}{seed:>6}{run['before']:>8.3f}{run['after']:>8.3f}{_gain(run):>+8.3f}"
        f"{run['steps']:>7}{run['seconds']:>9.1f}{run['peak_memory_mib']:>10}",
        flush=True,
    )
    if run["failed_sessions"]:
        print(f"          {run['failed_sessions']} sessions failed: {run['errors'][-1]}")
    return run


def _gain(run: dict[str, Any]) -> float:
    return float(run["after"] - run["before"])


def _learned(run: dict[str, Any]) -> bool:
    return bool(run["before"] <= BEFORE and run["after"] >= AFTER)


if __name__ == "__main__":
    sys.exit(main())
