"""Compare the benchmarks' ratios with the last ones kept: ``python benchmarks/check.py``.

A ratio is ours over a peer's figure of the same run, so that it means the same on another machine;
lower is better. Ratios that are worse by more than 15 % than each of the last three kept are named,
and the exit code is 1. On a shared machine one run varies by more than that, so a benchmark with
such a ratio runs twice more, and the best run of each ratio counts. ``--record`` runs each once and
adds the figures to benchmarks/history.jsonl instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
HISTORY = FOLDER / "history.jsonl"
WORSE = 1.15
KEPT = 3
"""Entries of a benchmark that are compared with."""
RUNS = 3
"""Runs, at most, of a benchmark that seems worse."""
NAMES = (
    "router",
    "proxy",
    "journal",
    "retention",
    "sessions",
    "streams",
    "sdk",
    "rollout",
    "trainer",
    "engine",
    "weights",
    "loop",
    "fleet",
    "dashboard",
    "cloud",
)
TIMEOUT = 1800
"""Seconds for one benchmark."""


def run(name: str, form: str) -> dict[str, float]:
    """Return the ratios of one run of a benchmark; RuntimeError with its output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ratios.json"
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--json", str(path)]
        if form != "full":
            command.append(f"--{form}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
        print(done.stdout, flush=True)
        if done.returncode:
            raise RuntimeError(f"{name} failed:\n{done.stderr[-3000:]}")
        return dict(json.loads(path.read_text()))


def kept(path: Path = HISTORY) -> list[dict[str, Any]]:
    """Return the entries of the history, oldest first."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line]


def worse(before: Sequence[dict[str, float]], now: dict[str, float]) -> list[str]:
    """Return a line for each ratio that is worse by more than 15 % than all before, or is gone."""
    out = [f"{name}: gone" for name in before[-1] if name not in now]
    for name, value in now.items():
        then = max((ratios[name] for ratios in before if name in ratios), default=None)
        if then is not None and value > then * WORSE:
            out.append(f"{name}: {value:.3g}, was {then:.3g} ({value / then - 1:+.0%})")
    return out


def compare(name: str, form: str) -> list[str]:
    """Run a benchmark, again while it seems worse, and return the lines of what is worse."""
    of_it = [e for e in kept() if (e["benchmark"], e["form"]) == (name, form)][-KEPT:]
    if not of_it:
        return [f"nothing is kept for its {form} form; run with --record"]
    best: dict[str, float] = {}
    for _ in range(RUNS):
        for ratio, value in run(name, form).items():
            best[ratio] = min(value, best.get(ratio, value))
        if not (found := worse([entry["ratios"] for entry in of_it], best)):
            break
    return [f"{line} ({of_it[-1]['commit']})" for line in found]


def record(name: str, form: str, ratios: dict[str, float]) -> None:
    """Add an entry to the history."""
    command = ["git", "-C", str(FOLDER), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    rounded = {key: float(f"{value:.4g}") for key, value in ratios.items()}
    entry = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "benchmark": name,
        "form": form,
        "ratios": rounded,
    }
    with HISTORY.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"benchmarks; default: {', '.join(NAMES)}")
    parser.add_argument("--form", choices=("smoke", "quick", "full"), default="quick")
    parser.add_argument("--record", action="store_true", help="add the figures to the history")
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    found: list[str] = []
    for name in args.names or NAMES:
        print(f"== {name}", flush=True)
        try:
            if args.record:
                record(name, args.form, run(name, args.form))
            else:
                found += [f"{name}: {line}" for line in compare(name, args.form)]
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found.append(f"{name}: {error}")
    for line in found:
        print(f"worse    {line}")
    if not found:
        print("recorded" if args.record else "nothing became worse by more than 15 %")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
