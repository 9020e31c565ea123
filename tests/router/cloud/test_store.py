"""The table of runs: what is acknowledged is on disk, and nobody else's file is taken for it."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from any_agent.errors import StartupError
from router.cloud.store import Run, RunStore


def a_run(trial: str = "t") -> Run:
    id = secrets.token_hex(4)
    return Run(id, "alice", "exp", trial, "tiny", "grpo", {"train.lr": 0.5})


async def test_changes_are_on_disk_before_they_are_acknowledged(tmp_path: Path) -> None:
    store = await RunStore.open(tmp_path)
    kept, gone = a_run("kept"), a_run("gone")
    await store.add(kept)
    await store.add(gone)
    assert await store.change(kept, "stop")
    await store.remove(gone)
    # Read by another process's connection, without a close.
    with sqlite3.connect(tmp_path / "cloud.sqlite") as other:
        rows = other.execute("SELECT id, wish FROM runs").fetchall()
        assert rows == [(kept.id, "stop")]
    other.close()
    await store.close()
    again = await RunStore.open(tmp_path)
    assert again.runs == {kept.id: replace(kept, wish="stop")}
    await again.close()


async def test_a_caller_that_leaves_does_not_leave_the_copy_behind_the_disk(tmp_path: Path) -> None:
    store = await RunStore.open(tmp_path)
    run = a_run()
    putting = asyncio.create_task(store.add(run))
    await asyncio.sleep(0)
    putting.cancel()
    await asyncio.wait([putting])
    await store.add(a_run("later"))
    assert run.id in store.runs
    await store.close()


async def test_two_runs_of_one_name_cannot_be(tmp_path: Path) -> None:
    store = await RunStore.open(tmp_path)
    await store.add(a_run())
    with pytest.raises(sqlite3.IntegrityError):
        await store.add(a_run())
    with sqlite3.connect(tmp_path / "cloud.sqlite") as other:
        assert other.execute("SELECT count(*) FROM runs").fetchone() == (1,)
    other.close()
    await store.close()


async def test_a_run_that_is_being_removed_stays_so_whoever_comes_after(tmp_path: Path) -> None:
    store = await RunStore.open(tmp_path)
    run = a_run()
    await store.add(run)
    changes = await asyncio.gather(*(store.change(run, w) for w in ("delete", "serve", "delete")))
    assert changes == [True, False, False]
    assert (store.runs[run.id].wish, store.of_account("alice")) == ("delete", [])
    await store.remove(run)
    assert not await store.change(run, "serve")
    assert store.runs == {}
    assert store.named("alice", "exp", "t") is None
    await store.close()


async def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "cloud.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(StartupError, match=r"cloud\.sqlite"):
        await RunStore.open(tmp_path)


async def test_a_table_of_another_format_is_refused(tmp_path: Path) -> None:
    await (await RunStore.open(tmp_path)).close()
    with sqlite3.connect(tmp_path / "cloud.sqlite") as other:
        other.execute("PRAGMA user_version = 9")
    other.close()
    with pytest.raises(StartupError, match="format 9"):
        await RunStore.open(tmp_path)


async def test_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    os.umask(0)
    try:
        await (await RunStore.open(tmp_path)).close()
    finally:
        os.umask(0o022)
    assert (tmp_path / "cloud.sqlite").stat().st_mode & 0o077 == 0
