"""Stand-ins for Slurm's programs, in PATH: they answer as these do, and keep what they are told."""

from __future__ import annotations

import os
from pathlib import Path

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
    "srun": "",
}


class Programs:
    """What became of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        (folder / "then").touch()
        self._folder = folder
        for name, source in _PROGRAMS.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\nHERE={folder}\n{source}")
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def away(self, said: str) -> None:
        """No controller answers; squeue says why."""
        (self._folder / "squeue").write_text(f"#!/bin/sh\ncat >&2 <<END\n{said}\nEND\nexit 1\n")

    def then(self, source: str) -> None:
        """Set what a submitted job does, as lines of a shell; `$1` is its script."""
        (self._folder / "then").write_text(source)

    @property
    def submitted(self) -> str:
        """The job's script."""
        return (self._folder / "submitted").read_text()

    @property
    def requeued(self) -> list[str]:
        """Jobs that were queued again."""
        path = self._folder / "requeued"
        return path.read_text().split() if path.exists() else []
