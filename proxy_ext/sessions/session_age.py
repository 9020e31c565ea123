"""How old a session is, across restarts, whatever is done to the wall clock.

A row holds the boot's id and the boot clock (CLOCK_BOOTTIME: it counts a suspended machine's time,
and nobody can set it) of its opening. After a reboot only the wall clock is left.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

from proxy_ext.journal import SessionRow

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def stamp() -> str:
    """Now, as `SessionRow.clock` keeps it."""
    return f"{_boot_id()} {_boot_seconds():.3f}"


def age(row: SessionRow) -> float:
    """Seconds since the session was opened."""
    boot, _, seconds = (row.clock or "").partition(" ")
    if boot and boot == _boot_id():
        passed = _boot_seconds() - float(seconds)
        # Far less than nothing: a container whose clock began anew. A little: the stamp's rounding.
        if passed > -1:
            return max(0.0, passed)
    return max(0.0, time.time() - row.created_at)


@functools.cache
def _boot_id() -> str:
    """Empty where the system has none: then every restart is like a reboot."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _boot_seconds() -> float:
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
