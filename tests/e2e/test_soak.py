"""The judges of a soak can say no; `make soak` is the run itself, which needs hours."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from any_agent.rundir.layout import RunDir
from any_agent.types import SessionState
from proxy_ext.archive.files import ArchiveWriter
from proxy_ext.archive.records import record_line
from proxy_ext.journal import SessionRow
from tests.support.e2e import audit, faults, sampling
from tests.support.e2e.audit import Record
from tests.support.e2e.faults import INTERVALS, KINDS, set_clock
from tests.support.e2e.sampling import Series, anonymous, trend
from tests.support.e2e.wire import wire_to
from tests.support.journal import make_interaction, make_row

HALF, END = 3600.0, 7200.0


def series(kind: str, *, per_hour: float, noise: float = 0.0, start: float = HALF) -> Series:
    """Samples of ten seconds, with a slope in the kind's own unit."""
    rng, bound = random.Random(0), sampling.BOUNDS[kind]
    at = [start + 10.0 * k for k in range(int((END - start) / 10))]
    values = [
        bound.scale * (100 + per_hour * (t - HALF) / 3600 + noise * rng.gauss(0, 1)) for t in at
    ]
    return Series("router", kind, 1, at, values)


@pytest.mark.parametrize("kind", sampling.BOUNDS)
def test_a_figure_that_grows_beyond_its_bound_is_seen(kind: str) -> None:
    bound = sampling.BOUNDS[kind]
    most = max(bound.per_hour, bound.slack)
    noisy = trend(series(kind, per_hour=0, noise=most / 10), HALF, END)
    assert noisy.problem is None
    leak = trend(series(kind, per_hour=1.5 * most, noise=most / 10), HALF, END)
    assert leak.problem is not None and leak.problem.startswith(f"router: {kind} grows by ")
    # A moment of each fault does not count, however high it goes.
    spiky = series(kind, per_hour=0)
    spiky.values[::7] = [1000 * value for value in spiky.values[::7]]
    assert trend(spiky, HALF, END).problem is None


def test_a_short_life_is_not_judged() -> None:
    late = series("memory", per_hour=1000, start=END - 600)
    assert not trend(late, HALF, END).judged
    assert trend(late, HALF, END).problem is None


def test_memory_leaves_out_mapped_files(tmp_path: Path) -> None:
    size = 32 << 20
    path = tmp_path / "library"
    path.write_bytes(b"x" * size)
    before = anonymous(os.getpid())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped.find(b"y") < 0
        assert anonymous(os.getpid()) - before < size // 2
    # A bytes object could lie in memory that the allocator kept from an earlier one.
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as own:
        own.write(b"x" * size)
        assert anonymous(os.getpid()) - before > size // 2


def test_one_outlier_does_not_change_the_slope() -> None:
    assert sampling.slope([], []) == sampling.slope([1], [5]) == 0
    assert sampling.slope([0, 1, 2, 3, 4], [0, 2, 4, 600, 8]) == 2


def test_every_kind_of_fault_strikes_in_a_twentieth_of_the_intervals() -> None:
    for rounds in (1, 6):
        for seed in range(20):
            plan = faults.plan(rounds * INTERVALS, random.Random(seed))
            assert plan == faults.plan(rounds * INTERVALS, random.Random(seed))
            assert {k: n for k, n in Counter(plan).items() if k} == dict.fromkeys(KINDS, rounds)
            later = set(plan[len(plan) // 2 :])
            assert not later & {f"{how} {p}" for how in ("kill", "term") for p in faults.PARTS[2:]}


LAGS = """\
# TYPE any_agent_loop_lag_seconds histogram
any_agent_loop_lag_seconds_bucket{part="rank-0",le="+Inf"} 10.0
any_agent_loop_lag_seconds_count{part="rank-0"} 10.0
any_agent_loop_lag_seconds_sum{part="rank-0"} 0.5
any_agent_loop_lag_seconds_count{part="router"} 4.0
any_agent_loop_lag_seconds_sum{part="router"} 1.0
"""


def test_the_lags_of_parts_are_summed_up_by_part() -> None:
    assert sampling.lags(LAGS) == {"rank-0": (0.5, 10.0), "router": (1.0, 4.0)}


def archived(run: RunDir, id: str, *, times: int = 1) -> SessionRow:
    row = replace(make_row(id, state=SessionState.EVALUATED), content="archived")
    for number in range(times):
        writer = ArchiveWriter(run.archive, 0, {})
        writer.add(number, record_line(number, row, [], [make_interaction(f"{id}-0", id)]))
        writer.finish()
    return row


def test_a_session_in_no_archive_or_in_two_is_seen(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    once = {"a": Record(archived(run, "a"), [])}
    assert audit.read_archives(run, 1, once) == []
    assert [i.id for i in once["a"].interactions] == ["a-0"]
    lost = {"b": Record(replace(make_row("b"), content="archived"), [])}
    assert audit.read_archives(run, 1, once | lost) == ["b is in no archive"]
    twice = {"c": Record(archived(run, "c", times=2), [])}
    assert audit.read_archives(run, 1, once | twice) == ["c is in 2 archives"]
    kept = {"a": Record(make_row("a"), [])}
    assert "a is in an archive and not called so" in audit.read_archives(run, 1, kept | twice)


def test_processes_see_the_clock_that_is_set(tmp_path: Path) -> None:
    clock, hook = tmp_path / "clock", Path(faults.__file__).parent / "clock"
    clock.write_bytes(bytes(8))
    code = "import time; print(time.time()); input(); print(time.time(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code],
        env={"PYTHONPATH": str(hook), "SOAK_CLOCK": str(clock)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert abs(float(process.stdout.readline()) - time.time()) < 600
        set_clock(clock, -7200.0)
        process.stdin.write("\n")
        process.stdin.flush()
        assert abs(float(process.stdout.readline()) + 7200 - time.time()) < 600


async def test_a_wire_can_be_cut_and_slowed_down() -> None:
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            got.put_nowait(data)
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(60), wire_to(f"http://127.0.0.1:{port}") as wire:
        reader, writer = await asyncio.open_connection(*wire.url[len("http://") :].split(":"))
        writer.write(b"a" * 200)
        assert await reader.readexactly(200) == await got.get()
        wire.slow = True
        writer.write(b"b" * 200)
        assert len(await got.get()) < 200
        wire.slow = False
        assert await reader.readexactly(200) == b"b" * 200
        assert wire.cut() == 1
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
            raise asyncio.IncompleteReadError(b"", 1)
        writer.close()
    server.close()
