"""A wall clock that a test can set: each process of a service under test imports this at its start.

``SOAK_CLOCK`` names a file with one float, the seconds by which the clock is wrong now. Without
that variable nothing is changed.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

_DOUBLE = struct.Struct("d")


def _install(path: str) -> None:
    real = time.time
    with open(path, "rb") as file:
        shared = mmap.mmap(file.fileno(), _DOUBLE.size, prot=mmap.PROT_READ)

    def wrong() -> float:
        return real() + float(_DOUBLE.unpack_from(shared)[0])

    time.time = wrong


if _path := os.environ.get("SOAK_CLOCK"):
    _install(_path)
