"""Processes that run functions: what their owner sees of their deaths."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pebble import ProcessPool

from any_agent.config import SECRET_VARIABLES
from any_agent.errors import ConfigError
from any_agent.runtime import worker_main as worker_process
from any_agent.runtime.worker_pool import (
    WorkerCrashed,
    WorkerPool,
    describe_starting,
    pack,
    unpicklable,
)
from tests.support import reward_functions as functions
from tests.support.proxy import until


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    """One worker, that lacks the operator's secrets."""
    pool = WorkerPool(1, secrets=SECRET_VARIABLES)
    yield pool
    await asyncio.to_thread(pool.close)


async def test_closing_ends_calls_and_a_later_one_starts_anew(
    pool: WorkerPool, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    hanging = [pool.run(functions.hangs_at, str(begun), timeout=600) for _ in range(2)]
    calls = [asyncio.create_task(one) for one in hanging]
    await until(begun.exists, "one of them has begun")
    await asyncio.to_thread(pool.close)
    done, _ = await asyncio.wait(calls, timeout=60)
    assert len(done) == 2
    for call in calls:
        with pytest.raises(WorkerCrashed):
            call.result()
    assert await pool.run(functions.by_name, "4", answer="4", timeout=60) == 1.0


async def test_a_call_has_its_own_environment_and_this_process_keeps_its_own(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other threads of this process read their variables meanwhile."""
    monkeypatch.setenv(SECRET_VARIABLES[0], "operator-secret")
    removed: list[bytes] = []
    monkeypatch.setattr(os, "unsetenv", removed.append)
    told = await pool.run(functions.variable, "OF_A_CALL", timeout=60, environ={"OF_A_CALL": "x"})
    assert told == "x"
    assert await pool.run(functions.variable, "OF_A_CALL", timeout=60) is None
    assert await pool.run(functions.variable, SECRET_VARIABLES[0], timeout=60) is None
    # Other processes of this user can read what a process was started with.
    first = await pool.run(functions.first_environment, timeout=60)
    assert b"PATH=" in first and SECRET_VARIABLES[0].encode() not in first
    assert os.environ[SECRET_VARIABLES[0]] and not removed


class Unclosed:
    """As HTTP clients do, it wants to close itself in whatever event loop runs when it goes."""

    gone_in: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        self.gone_in.append(asyncio._get_running_loop() is not None)


async def leaves_one(fails: bool) -> None:
    one = Unclosed()
    if fails:
        raise ValueError(one)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_coroutine_leaves_is_gone_before_the_next_call(fails: bool) -> None:
    Unclosed.gone_in.clear()
    worker_process.call(pack(leaves_one, (fails,)), {})
    assert Unclosed.gone_in == [False]


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    assert unpicklable({"a": [1, {"b": lock}]}, "data") == f"data['a'][1]['b'] ({lock!r})"
    assert unpicklable([1, "x"]) is None
    with pytest.raises(ConfigError):
        WorkerPool(0)


def test_workers_outlive_the_thread_that_called_first() -> None:
    """The event loop of an executor ends with it, and the next executor has the same workers."""
    pool = WorkerPool(2)
    found: list[int] = []

    def use() -> None:
        found.append(asyncio.run(pool.run(os.getpid, timeout=60)))

    for _ in range(2):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    pool.close()
    assert len(found) == 2


async def test_who_waits_learns_that_workers_are_starting(pool: WorkerPool) -> None:
    """It takes a minute on a busy machine, and the trainer waits for its episodes meanwhile."""
    assert pool.starting == 0
    call = asyncio.create_task(pool.run(functions.by_name, "4", answer="4", timeout=60))
    await asyncio.sleep(0)
    assert pool.starting == 1
    said = describe_starting()
    assert said is not None and "1 calls wait" in said
    assert await call == 1.0
    later = asyncio.create_task(pool.run(functions.by_name, "4", answer="4", timeout=60))
    await asyncio.sleep(0)
    assert (pool.starting, describe_starting()) == (0, None)
    await later


async def test_a_pool_that_broke_while_it_was_idle_is_replaced(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, broken = ProcessPool.schedule, [RuntimeError("Unexpected error within the Pool")]

    def breaking(pool: ProcessPool, *given: Any, **named: Any) -> Any:
        if broken:
            raise broken.pop()
        return schedule(pool, *given, **named)

    monkeypatch.setattr(ProcessPool, "schedule", breaking)
    assert await pool.run(functions.by_name, "4", answer="4", timeout=60) == 1.0
    assert not broken
