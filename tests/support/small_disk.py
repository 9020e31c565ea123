"""A small disk of its own: a tmpfs, which can be filled to its last byte. It needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Disk:
    """A small disk that can be filled to its last byte."""

    folder: Path

    def fill(self, *, leave: int = 0) -> None:
        """Fill the disk, but for ``leave`` bytes."""
        if leave:
            free = shutil.disk_usage(self.folder).free
            (self.folder / "filler").write_bytes(bytes(free - leave))
            return
        with (self.folder / "filler").open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    def make_room(self) -> None:
        (self.folder / "filler").unlink()

    @property
    def log_size(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("*-wal"))


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Disk]:
    """Mount a disk of ``size`` bytes at a folder; without root the test is skipped, in CI fails."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        why = f"a small disk cannot be mounted here: {done.stderr.strip()}"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
