"""Tiny models to which `python -m any_agent.demo.model` teaches a skill: each is made once."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.environment import FOLDER
from tests.support.e2e.serving import environment

ROOT = Path(__file__).resolve().parents[2]
_MADE_BY = ("demo/model.py", "demo/task.py", "demo/models/*.py", "chat/**/*.py")
"""Modules of `any_agent` that make a taught model."""
_PINS = ROOT / "constraints.txt"
_LIMIT = 600.0


def taught_model(skill: str, seed: int = 0) -> Path:
    """The folder of a model, kept beside the clients' environments while its makers are the same.

    It is made in a process of its own: threads of torch must not disturb those who wait here.
    """
    files = [file for part in _MADE_BY for file in sorted((ROOT / "any_agent").glob(part))]
    code = b"".join(file.read_bytes() for file in (*files, _PINS))
    digest = hashlib.blake2b(code, digest_size=6).hexdigest()
    made = FOLDER / "models" / f"{skill}-{seed}-{digest}"
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(made.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            half = made.with_suffix(".half")
            shutil.rmtree(half, ignore_errors=True)
            command = [sys.executable, "-m", "any_agent.demo.model", str(half), "--skill", skill]
            done = subprocess.run(
                [*command, "--seed", str(seed)],
                cwd=ROOT,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=_LIMIT,
            )
            assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
            half.rename(made)
    return made


def copy_model(path: Path, skill: str = "echo", seed: int = 0) -> None:
    """Leave such a model in a folder that is not there yet."""
    shutil.copytree(taught_model(skill, seed), path)
