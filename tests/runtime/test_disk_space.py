"""Full disks: how an error tells of one, and writes that wait for space and tell of it."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from any_agent.errors import StoreFull, TrainingError
from any_agent.runtime import disk_space
from any_agent.runtime.disk_space import (
    DiskForecast,
    DiskSpace,
    DiskWaitEnded,
    has_space,
    is_disk_full,
)
from tests.support.small_disk import small_disk

FULL = OSError(errno.ENOSPC, "No space left on device")


def chained(cause: BaseException) -> Exception:
    error = TrainingError("the checkpoint cannot be written")
    error.__cause__ = cause
    return error


FULL_DISKS: list[Exception] = [
    FULL,
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("I/O error: No space left on device (os error 28)"),
    Exception("Disk quota exceeded (os error 122)"),
    StoreFull("the journal's disk is full"),
    chained(FULL),
    TrainingError("training process 1 failed: [Errno 28] No space left on device"),
]
OTHERS = [None, OSError(errno.EIO, "Input/output error"), ValueError("28"), chained(KeyError())]


@pytest.mark.parametrize("error", [*FULL_DISKS, *OTHERS], ids=repr)
def test_a_full_disk_is_known_by_its_error(error: Exception | None) -> None:
    assert is_disk_full(error) == (error in FULL_DISKS)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The free bytes of the disk, and no delays."""
    monkeypatch.setattr(disk_space, "POLL_INTERVAL", 0.01)
    now = SimpleNamespace(free=1 << 40)
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: now)
    return now


def failing(times: int, tried: list[int]) -> Callable[[], str]:
    def work() -> str:
        tried.append(1)
        if len(tried) <= times:
            raise FULL
        return "written"

    return work


def test_a_write_is_repeated_until_it_succeeds(
    free: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []
    disk = DiskSpace()
    assert disk.write(failing(3, tried), tmp_path, "the manifest") == "written"
    assert len(tried) == 4 and disk.waiting is None
    assert len(caplog.records) == 2, "once for the wait, once for its end"
    with pytest.raises(ZeroDivisionError):
        disk.write(lambda: 1 / 0, tmp_path, "x")


def until(condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(6000):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it did not come about")


def test_what_does_not_fit_is_not_tried_and_the_wait_is_told(
    free: SimpleNamespace, tmp_path: Path
) -> None:
    free.free = 5000
    disk, tried = DiskSpace(), list[int]()
    needed = (2 << 20).__int__
    results: list[str] = []
    thread = threading.Thread(
        target=lambda: results.append(disk.write(failing(0, tried), tmp_path, "weights", needed))
    )
    thread.start()
    until(lambda: disk.waiting is not None)
    assert str(disk.waiting) == (
        f"disk full, 2,097,152 bytes needed: weights waits for space in {tmp_path}"
    )
    assert tried == []
    free.free = 3 << 20
    thread.join(60)
    assert results == ["written"] and disk.waiting is None


def test_a_stop_ends_the_wait(free: SimpleNamespace, tmp_path: Path) -> None:
    free.free = 0
    disk, ended = DiskSpace(), list[Exception]()

    def write() -> None:
        try:
            disk.write(failing(10**6, []), tmp_path, "the checkpoint")
        except DiskWaitEnded as error:
            ended.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    until(lambda: disk.waiting is not None)
    disk.stop()
    thread.join(60)
    assert "the checkpoint waits" in str(ended[0]) and disk.waiting is None


def test_space_is_judged_rightly_on_a_real_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        assert has_space(tmp_path, disk.folder)
        disk.fill(leave=1 << 19)
        assert not has_space(tmp_path, disk.folder)
        disk.make_room()
        assert has_space(disk.folder)
    assert has_space(tmp_path / "missing"), "another fault is not a full disk"


FORECASTS: dict[str, tuple[Callable[[float], float], float, float]] = {
    # A gigabyte a minute, of which enough is left for half an hour.
    "it fills steadily": (lambda t: 41e9 - t / 60 * 1e9, 11, 1800),
    "for an hour": (lambda t: 90e9 - t / 60 * 1e9, 60, 1800),
    "for hours": (lambda t: 230e9 - t / 60 * 1e9, 200, 1800),
    "what is written is removed again": (lambda t: 20e9 - (t % 300) / 300 * 15e9, 60, math.inf),
    # 49 GB are free at the least, of which 10 MB go each second.
    "and it grows below": (lambda t: 100e9 - t * 1e7 - (t % 300) / 300 * 15e9, 60, 4900),
    "space was freed": (lambda t: 9e9 - t * 2e6 + (t > 1800) * 5e9, 60, math.inf),
    "the first minutes tell nothing": (lambda t: 10e9 - t * 1e7, 9, math.inf),
}


@pytest.mark.parametrize("case", FORECASTS)
def test_a_disk_that_fills_steadily_tells_when_it_is_full(free: SimpleNamespace, case: str) -> None:
    """Looked at every ten seconds."""
    bytes_at, minutes, seconds_left = FORECASTS[case]
    now = 0.0
    made = DiskForecast(Path(), clock=lambda: now)
    while now <= 60 * minutes:
        free.free = int(bytes_at(now))
        made.look()
        now += 10.0
    assert made.seconds_left == pytest.approx(seconds_left, rel=0.1)
    assert made.free == free.free
