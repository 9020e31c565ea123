"""A journal whose file is removed, renamed or replaced while its rank works."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from any_agent.errors import StoreUnavailable
from proxy_ext.journal import PutMeta, SQLiteJournal
from proxy_ext.journal.writer import JournalJob


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SQLiteJournal]:
    (tmp_path / "journal").mkdir()
    journal = SQLiteJournal(tmp_path / "journal" / "rank-0.sqlite")
    yield journal
    await journal.close()


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replace(folder: Path) -> None:
    rename(folder)
    shutil.copytree(folder.with_name("elsewhere"), folder)


@pytest.mark.parametrize("how", [remove, rename, replace])
async def test_nothing_is_acknowledged_without_a_file_behind_it(
    journal: SQLiteJournal, tmp_path: Path, how: Callable[[Path], None]
) -> None:
    await journal.commit(PutMeta("before", "1"))
    assert journal.stats.lost is None
    how(tmp_path / "journal")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await journal.commit(PutMeta("after", "1"))
    assert "rank-0.sqlite" in (journal.stats.lost or "")
    if how is not remove:
        kept = sqlite3.connect(tmp_path / "elsewhere" / "rank-0.sqlite")
        names = [name for (name,) in kept.execute("SELECT key FROM meta")]
        kept.close()
        assert "before" in names and "after" not in names


@pytest.mark.parametrize("how", [remove, rename, replace])
async def test_nothing_is_acknowledged_whose_file_goes_during_the_transaction(
    journal: SQLiteJournal, tmp_path: Path, how: Callable[[Path], None]
) -> None:
    job = JournalJob(lambda _: how(tmp_path / "journal"), writes=True)
    with pytest.raises(StoreUnavailable):
        await journal.writer.submit(job)
    with pytest.raises(StoreUnavailable):
        await journal.commit(PutMeta("after", "1"))
