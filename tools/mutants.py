"""Plant faults in copies of the product, and see which tests turn red.

``tests/mutants.toml`` has the faults, each with the promise that it breaks and the tests that must
catch it; ``tests/mutants.md`` is the table of the last whole run. A fault that no test catches is
a hole in the tests: the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests" / "mutants.toml"
TABLE = ROOT / "tests" / "mutants.md"
LIMIT = 900.0
"""Seconds for one fault's tests: a fault may make a test wait until its own limit."""
_sound: dict[tuple[str, ...], tuple[int, str]] = {}
"""The outcome of tests without a fault."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault: a text that stands once in a file, and what takes its place."""

    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @classmethod
    def of(cls, found: dict[str, Any]) -> Mutant:
        return cls(**{**found, "tests": tuple(found["tests"])})


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a fault's tests."""

    mutant: Mutant
    caught_by: str = ""
    """The first test that turned red."""
    why: str = ""
    """The reason where none did."""
    seconds: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="faults whose promise or file has this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies at once")
    given = parser.parse_args(arguments)
    mutants = [Mutant.of(found) for found in tomllib.loads(FAULTS.read_text())["mutant"]]
    if misplaced := [problem for mutant in mutants if (problem := problem_of(mutant))]:
        print("\n".join(misplaced), file=sys.stderr)
        return 1
    chosen = [m for m in mutants if given.only in m.promise or given.only in m.file]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(given.jobs):
            copies.put(copy_to(Path(folder) / str(number)))
        with ThreadPoolExecutor(given.jobs) as pool:
            outcomes = list(pool.map(lambda mutant: try_out(mutant, copies), chosen))
    missed = [outcome for outcome in outcomes if not outcome.caught_by]
    for outcome in missed:
        print(f"missed   {outcome.mutant.promise} ({outcome.mutant.file}): {outcome.why}")
    print(f"mutants  {len(outcomes) - len(missed)} of {len(outcomes)} are caught")
    if chosen == mutants:
        TABLE.write_text(table_of(outcomes), encoding="utf-8")
    return 1 if missed else 0


def problem_of(mutant: Mutant) -> str:
    """Return why a fault cannot be planted, "" if it can."""
    found = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)
    if found != 1:
        return f"{mutant.file} has {found} times what {mutant.promise!r} changes: {mutant.old!r}"
    gone = [name for name in mutant.tests if not (ROOT / name).exists()]
    return f"{mutant.promise!r} names tests that are gone: {', '.join(gone)}" if gone else ""


def copy_to(folder: Path) -> Path:
    """Copy the checkout's files, also those that are not committed yet."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def try_out(mutant: Mutant, copies: queue.Queue[Path]) -> Outcome:
    """Run a fault's tests without it, where they must pass, and with it."""
    copy = copies.get()
    began = time.monotonic()
    try:
        if mutant.tests not in _sound:
            _sound[mutant.tests] = _pytest(copy, mutant.tests)
        code, said = _sound[mutant.tests]
        if code != 0:
            return Outcome(mutant, why=f"its tests fail without it, too: {_last_line(said)}")
        with planted(copy / mutant.file, mutant):
            code, said = _pytest(copy, mutant.tests)
    finally:
        copies.put(copy)
    seconds = time.monotonic() - began
    red = _FAILED.search(said)
    if code == 1 and red:
        print(f"caught   {mutant.promise}: {red[1]} ({seconds:.0f} s)", flush=True)
        return Outcome(mutant, caught_by=red[1], seconds=seconds)
    why = "all of its tests pass" if code == 0 else f"pytest ended with {code}: {_last_line(said)}"
    return Outcome(mutant, why=why, seconds=seconds)


@contextmanager
def planted(path: Path, mutant: Mutant) -> Iterator[None]:
    """Change a file for the time of the context."""
    sound, stat = path.read_bytes(), path.stat()
    path.write_text(sound.decode().replace(mutant.old, mutant.new), encoding="utf-8")
    # Python tells a module from a compiled one by size and whole seconds.
    os.utime(path, (stat.st_atime, stat.st_mtime + 3600 + time.monotonic() % 1e6))
    try:
        yield
    finally:
        path.write_bytes(sound)
        os.utime(path, (stat.st_atime, stat.st_mtime))


def _pytest(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests up to the first red one; return the exit status, -1 past the limit, and output."""
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "-p", "no:cacheprovider", *tests)
    variables = {**os.environ, "PYTHONPATH": str(copy)}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        done = subprocess.run(
            command,
            cwd=copy,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, f"it took more than {LIMIT:.0f} s"
    return done.returncode, done.stdout


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def table_of(outcomes: Sequence[Outcome]) -> str:
    """Return the table of a whole run as Markdown."""
    commit = subprocess.run(
        ("git", "rev-parse", "--short=8", "HEAD"), cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    caught = sum(bool(outcome.caught_by) for outcome in outcomes)
    lines = [
        "# Planted faults",
        "",
        f"Written by `make mutants` on {datetime.date.today()} at {commit}: {caught} of "
        f"{len(outcomes)} are caught. [mutants.toml](mutants.toml) has the faults themselves.",
        "",
        "| promise | fault in | first red test |",
        "|---|---|---|",
    ]
    for outcome in outcomes:
        red = f"`{outcome.caught_by}`" if outcome.caught_by else f"**none**: {outcome.why}"
        lines.append(f"| {outcome.mutant.promise} | `{outcome.mutant.file}` | {red} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
