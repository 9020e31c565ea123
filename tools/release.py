"""Go through the checklist of a release: ``python tools/release.py [--only NAME ...]``.

Each line is a step with `ok` or `failed`, and what to do; a failed step does not end the list,
but the exit code is then 1. Nothing is tagged or uploaded.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SUMS = DIST / "SHA256SUMS"


def main() -> int:
    parser = argparse.ArgumentParser(description="Go through the checklist of a release.")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="NAME", help=", ".join(STEPS))
    chosen = parser.parse_args().only or list(STEPS)
    failed = [name for name in STEPS if name in chosen and not _go(name)]
    print(f"{len(failed)} of {len(chosen)} failed: {', '.join(failed)}" if failed else "ready")
    return 1 if failed else 0


def _go(name: str) -> bool:
    began = time.monotonic()
    problem = STEPS[name]()
    result = f"failed    {problem}" if problem else "ok"
    print(f"{name:<10} {time.monotonic() - began:7.1f} s  {result}", flush=True)
    return not problem


def clean_tree() -> str:
    """Return the problem of files that are not committed, "" without any."""
    changed = _output("git", "status", "--porcelain")
    return f"commit or remove these first:\n{changed}" if changed else ""


def version() -> str:
    """Return the problem of a version that differs between files or has no entry."""
    return version_problem(
        (ROOT / "pyproject.toml").read_text("utf-8"),
        (ROOT / "any_agent" / "__init__.py").read_text("utf-8"),
        (ROOT / "CHANGELOG.md").read_text("utf-8"),
    )


def version_problem(pyproject: str, package: str, changelog: str) -> str:
    """Return what keeps these texts from being a release's, "" if nothing does."""
    number = tomllib.loads(pyproject)["project"]["version"]
    own = re.search(r'^__version__ = "(.+)"$', package, re.M)
    if own is None or own[1] != number:
        return f"pyproject.toml has {number}, any_agent {own[1] if own else 'none'}"
    entry = re.search(rf"^## \[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.M)
    if entry is None:
        return f"CHANGELOG.md has no '## [{number}] - YYYY-MM-DD': give [Unreleased] that name"
    open_notes = changelog.partition("## [Unreleased]")[2].partition("\n## ")[0].strip()
    return "CHANGELOG.md still has notes under [Unreleased]" if open_notes else ""


def make(*targets: str) -> Callable[[], str]:
    """Return the step that makes targets of the Makefile."""

    def step() -> str:
        for target in targets:
            done = subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                return f"make {target}:\n{(done.stdout + done.stderr)[-3000:]}"
        return ""

    return step


def checksums() -> str:
    """Write the checksums of all that is published; return a problem, "" without any."""
    files = sorted(p for p in DIST.glob("*") if p != SUMS)
    kinds = {"".join(p.suffixes[-2:]) if p.name.endswith(".gz") else p.suffix for p in files}
    if not {".whl", ".tar.gz", ".json"} <= kinds:
        return "dist/ lacks the wheel, the source distribution or the bill: make dist"
    sums = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}" for p in files]
    SUMS.write_text("\n".join(sums) + "\n", encoding="utf-8")
    return ""


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


STEPS: dict[str, Callable[[], str]] = {
    "tree": clean_tree,
    "version": version,
    "lint": make("lint"),
    "tests": make("gate", "verify"),
    "docs": make("docs"),
    "dist": make("dist"),
    "checksums": checksums,
}

if __name__ == "__main__":
    sys.exit(main())
