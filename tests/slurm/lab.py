"""A real Slurm of two nodes on this machine, and what is asked of it.

``python -m tests.slurm.lab`` installs Debian's packages for it, which its tests do not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.ports import own_port
from tests.support.real_parts import environment

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 720.0
"""Seconds in which anything must have happened that a test waits for."""
_SCRIPT = Path(__file__).with_name("slurm_lab.sh")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@dataclass(frozen=True, slots=True)
class Slurm:
    """A running one."""

    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """With which a program finds it, and no settings of ours."""
        return environment(SLURM_CONF=str(self.folder / "slurm.conf"), PATH=_PATH)

    def ask(self, *command: str) -> str:
        """What one of its programs prints."""
        done = subprocess.run(
            command, env=self.variables, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """`PENDING`, `RUNNING`, ..., also of a job that ended a while ago."""
        return self.ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    @property
    def apart(self) -> bool:
        """True if n2 has processes, and the folder `apart`, of its own."""
        return (self.folder / "apart" / "of-n1").exists()

    def lose(self) -> None:
        """End all that runs on n2 at once, as without power; its part of `apart` is gone, too."""
        assert self.apart
        psutil.Process(int((self.folder / "n2.pid").read_text())).kill()

    def limit(self, job: str, minutes: int) -> None:
        """Its time limit, from its start."""
        self.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def processes(self, job: str) -> list[psutil.Process]:
        """All of a job that live, on whichever node, whoever started them."""
        out = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SLURM_JOB_ID") == job:
                    out.append(process)
            except psutil.Error:
                continue
        return [process for process in out if process.status() != psutil.STATUS_ZOMBIE]


def until(met: Callable[[], object], told: Callable[[], str], within: float = PATIENCE) -> None:
    """Wait for it; ``told`` is what to say if it does not come."""
    deadline = time.monotonic() + within
    while not met():
        assert time.monotonic() < deadline, told()
        time.sleep(0.25)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Two nodes, n1 and n2; skipped with the reason where there are none, but never in CI."""
    if missing := _missing():
        why = f"there is no Slurm here ({', '.join(missing)}): run python -m tests.slurm.lab"
        if os.environ.get("CI") == "true":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    made = Slurm(folder)
    log = folder / "lab.log"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with open(log, "w") as out:
            # Its daemons keep what they write to open: no pipe.
            command = ["bash", str(_SCRIPT), "up", str(folder)]
            command += [str(own_port()) for _ in range(3)]
            done = subprocess.run(
                command, env=made.variables, stdout=out, stderr=out, timeout=300, check=False
            )
        assert done.returncode == 0, _said(folder)
        yield made
    finally:
        _end(made)


def _end(made: Slurm) -> None:
    environment_ = made.variables
    jobs = subprocess.run(
        ["squeue", "--noheader", "--format=%i"], env=environment_, capture_output=True, text=True
    ).stdout.split()
    for job in jobs:
        subprocess.run(["scancel", job], env=environment_, capture_output=True, timeout=60)
    for job in jobs:
        deadline = time.monotonic() + 60
        while made.processes(job) and time.monotonic() < deadline:
            time.sleep(0.25)
        for process in made.processes(job):
            process.kill()
    subprocess.run(["bash", str(_SCRIPT), "down", str(made.folder)], env=environment_, timeout=60)


def _missing() -> list[str]:
    """Return the programs of Slurm that are not here."""
    return [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]


def _said(folder: Path) -> str:
    logs = [folder / "lab.log", *sorted((folder / "log").glob("*.log"))]
    return "\n".join(f"== {path}\n{path.read_text()[-2000:]}" for path in logs if path.exists())


def install() -> int:
    """Install Debian's packages for what is missing, and say so; 1 if something still is."""
    if not _missing():
        print("slurm    there already")
        return 0
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        print(f"error: {', '.join(_PACKAGES)} can be installed by root and apt-get only")
        return 1
    get = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *_PACKAGES]
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for command in (get, ["apt-get", "update", "-qq"], get):
        if not _missing():
            break
        print(f"slurm    {' '.join(command)}", flush=True)
        done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=900)
        said = done.stderr
    if missing := _missing():
        print(f"error: no {', '.join(missing)}:\n{said[-3000:]}")
        return 1
    print("slurm    installed")
    return 0


if __name__ == "__main__":
    sys.exit(install())
