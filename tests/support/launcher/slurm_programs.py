"""Stand-ins for Slurm's programs, in PATH: they answer as these do, and keep what they are told."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ADDRESS = "127.0.0.2"
"""Of every node."""
_PROGRAMS = {
    "scontrol": f"""
case "$*" in
  *"show hostnames"*) echo n1;;
  *"show node"*) echo "NodeName=n1 NodeAddr={ADDRESS} State=IDLE";;
  "requeue "*) echo "$2" >> "$HERE/requeued";;
esac
""",
    "squeue": 'cat "$HERE/queue" 2>/dev/null || :\n',
    "sbatch": 'cp "$1" "$HERE/submitted"; echo "7 PENDING" > "$HERE/queue"; . "$HERE/then"\n',
    "srun": f'exec {sys.executable} "$HERE/launcher.py" "$@"\n',
}
_LAUNCHER = """
import json, os, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
TOLD = dict(zip(sys.argv, sys.argv[1:]))
NODE = next(w.partition("=")[2] for w in sys.argv if w.startswith("--nodelist="))
NAME = next(w.partition("=")[2] for w in sys.argv if w.startswith("--job-name="))


def has(mood):
    return os.path.exists(os.path.join(HERE, f"{NODE}.{mood}"))


def register(name):
    folder = os.path.join(os.path.dirname(TOLD["--config"]), "registry")
    entry = {"name": name, "boot_id": TOLD["--start"], "url": "http://unused"}
    entry |= {"pid": os.getpid(), "state": "ready"}
    with open(os.path.join(folder, "." + name), "w") as file:
        json.dump(entry, file)
    os.replace(os.path.join(folder, "." + name), os.path.join(folder, name + ".json"))


role = json.loads(TOLD["--role"])
with open(os.path.join(HERE, "sruns"), "a") as file:
    file.write(json.dumps({"node": NODE, "name": NAME, "role": role}) + "\\n")
while has("hangs"):
    time.sleep(0.05)
if has("lost"):
    sys.exit(1)
while not (has("lost") or has("hangs")):
    register(NAME)
    if role["training"] is not None:
        register("trainer")
    time.sleep(0.2)
    if has("fails"):
        break
sys.exit(1)
"""
"""A launcher of another node: it keeps itself and a trainer registered until its node is lost."""


class Programs:
    """What became of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        (folder / "then").touch()
        (folder / "launcher.py").write_text(_LAUNCHER)
        self._folder = folder
        for name, source in _PROGRAMS.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\nHERE={folder}\n{source}")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def mood(self, node: str, mood: str) -> None:
        """Have a node be `lost`, or hang from now on (`hangs`), or its launchers fail (`fails`)."""
        (self._folder / f"{node}.{mood}").touch()

    @property
    def launched(self) -> list[dict[str, Any]]:
        """The starts of launchers: node, name and role."""
        path = self._folder / "sruns"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def away(self, said: str) -> None:
        """No controller answers; squeue says why."""
        (self._folder / "squeue").write_text(f"#!/bin/sh\ncat >&2 <<END\n{said}\nEND\nexit 1\n")

    def then(self, source: str) -> None:
        """Set what a submitted job does, as lines of a shell; `$1` is its script."""
        (self._folder / "then").write_text(source)

    def end_jobs(self) -> None:
        """Empty the queue."""
        (self._folder / "queue").unlink()

    @property
    def submitted(self) -> str:
        """The job's script."""
        return (self._folder / "submitted").read_text()

    @property
    def requeued(self) -> list[str]:
        """Jobs that were queued again."""
        path = self._folder / "requeued"
        return path.read_text().split() if path.exists() else []
