"""The clock that cannot be set: seconds since the machine's boot, those of its suspension too."""

from __future__ import annotations

import functools
import time
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_seconds() -> float:
    """Return the clock's time. Unlike `time.monotonic` it goes on while the machine is suspended,
    where the platform has such a clock (CLOCK_BOOTTIME)."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def clock_stamp() -> str:
    """Return the present time as journals store it: the boot's id and its seconds."""
    return f"{boot_id()} {boot_seconds():.3f}"


def seconds_since(stamp: str | None, wall: float) -> float:
    """Return the seconds since a `clock_stamp`, across restarts and changes of the wall clock.

    After a reboot, or without a stamp, only the wall clock is left, which showed ``wall`` then.
    """
    boot, _, seconds = (stamp or "").partition(" ")
    if boot and boot == boot_id():
        passed = boot_seconds() - float(seconds)
        # Slightly negative: the stamp was rounded. Far below: a container whose clock restarted.
        if passed > -1:
            return max(0.0, passed)
    return max(0.0, time.time() - wall)


@functools.cache
def boot_id() -> str:
    """Return the boot's id; "" without one: then every restart counts as a reboot."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
