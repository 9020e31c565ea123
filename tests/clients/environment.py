"""Environments of the clients that are tried: their pins collide with each other and with ours."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

_OURS = (sys.executable, "-m")
FOLDER = Path(__file__).resolve().parents[2] / ".venv-clients"
_MAKING: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
"""One at a time makes a folder: of the threads of a process, and of all processes."""


def python_with(name: str, pins: Path, *, ours: bool = False) -> Path:
    """The interpreter of an environment of this name that holds just these; made if need be.

    With ``ours`` what is installed here is found behind them: theirs comes first where both have
    a package, as if one environment had been made for both.
    """
    folder = FOLDER / name
    python = folder / "bin" / "python"

    def make() -> None:
        # Ours installs into it: an environment without pip of its own is there at once.
        _run([*_OURS, "venv", "--clear", "--without-pip", folder], 120)
        pip = ("pip", "--python", python, "install", "-qq", "--disable-pip-version-check")
        # Every package is pinned: there is nothing to be worked out.
        _run([*_OURS, *pip, "--no-compile", "--no-deps", "-r", pins], 600)
        if ours:
            line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "ours.pth").write_text(line, encoding="utf-8")

    _once(folder, [pins], make)
    return python


def node_with(name: str, manifest: Path) -> Path:
    """A folder of this name with the packages of a `package.json` and its lock; made if need be."""
    folder = FOLDER / name
    lock = manifest.with_name("package-lock.json")
    npm = component("npm")

    def make() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in (manifest, lock):
            shutil.copy(file, folder)
        _run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder], 600)

    _once(folder, [manifest, lock], make)
    return folder


def component(program: str) -> str:
    """Where a program is that not every machine has; CI has all of them."""
    found = shutil.which(program)
    if found is None:
        why = f"{program} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    return found


def _once(folder: Path, wanted: Sequence[Path], make: Callable[[], None]) -> None:
    """Make it unless it was made just so: whole, and of these files."""
    digest = hashlib.blake2b(b"\n".join(p.read_bytes() for p in wanted), digest_size=6).hexdigest()
    stamp = folder / f".made-{digest}"
    FOLDER.mkdir(exist_ok=True)
    with _MAKING[folder], open(FOLDER / f"{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            make()
            stamp.touch()


def _run(command: Sequence[str | Path], limit: float) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}\n{done.stderr}"
