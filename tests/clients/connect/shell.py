"""The shell in which a reader runs a block of docs/how-to/connect."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.clients.client import APART
from tests.support.e2e.serving import environment

_LIMIT = 300.0
"""Seconds."""
_NOT_A_READERS = ("PYTHON", "OPENAI", "ANTHROPIC", "CLAUDE", "CODEX")


def reader_shell(url: str, *, home: Path, programs: Sequence[Path] = ()) -> dict[str, str]:
    """Return the variables of a shell that knows a service; ``programs`` are folders of them."""
    given = environment(**APART, HOME=str(home), ANY_AGENT_URL=url)
    given = {k: v for k, v in given.items() if not k.startswith(_NOT_A_READERS)}
    folders = [*map(str, programs), str(Path(sys.executable).parent), given["PATH"]]
    return {**given, "PATH": os.pathsep.join(folders)}


def script(code: str) -> list[str | Path]:
    """Return the command that runs a block of bash."""
    return ["bash", "-euo", "pipefail", "-c", code]


def run(command: list[str | Path], variables: dict[str, str], folder: Path) -> str:
    """Return what it printed; AssertionError with all that it said if it does not end well."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.strip()
