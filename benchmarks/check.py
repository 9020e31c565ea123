"""Compare the benchmarks' ratios with the last ones kept: ``python benchmarks/check.py``.

Each benchmark's quick form runs once. A ratio is ours over a peer's figure of the same run, so that
it means the same on another machine; lower is better. Ratios that became worse by more than
15 % are named, and the exit code is 1. ``--record`` adds the figures to benchmarks/history.jsonl
instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
HISTORY = FOLDER / "history.jsonl"
WORSE = 1.15
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


def worse(before: dict[str, float], now: dict[str, float]) -> list[str]:
    """Return a line for each ratio that is worse than before by more than 15 %, or is gone."""
    out = [f"{name}: gone" for name in before if name not in now]
    for name, value in now.items():
        then = before.get(name)
        if then is not None and value > then * WORSE:
            out.append(f"{name}: {value:.3g}, was {then:.3g} ({value / then - 1:+.0%})")
    return out


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
            now = run(name, args.form)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            found.append(f"{name}: {error}")
            continue
        if args.record:
            record(name, args.form, now)
            continue
        of_it = [e for e in kept() if (e["benchmark"], e["form"]) == (name, args.form)]
        if not of_it:
            found.append(f"{name}: nothing is kept for its {args.form} form; run with --record")
            continue
        last = of_it[-1]
        found += [f"{name}: {line} ({last['commit']})" for line in worse(last["ratios"], now)]
    for line in found:
        print(f"worse    {line}")
    if not found:
        print("recorded" if args.record else "nothing became worse by more than 15 %")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
