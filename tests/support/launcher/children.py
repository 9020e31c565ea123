"""What the tests of children share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Wait for something, for a bounded time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie is only waiting to be counted."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
