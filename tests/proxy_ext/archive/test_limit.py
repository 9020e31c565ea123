"""The limit of the archives: the oldest go, nothing that a resume needs, killed or not."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from any_agent.config import load_config
from any_agent.rundir.layout import RunDir
from any_agent.types import SessionState
from proxy_ext.archive import archiver as sweep
from proxy_ext.archive.files import list_archives
from proxy_ext.export import reader
from proxy_ext.service import archive_limit
from tests.proxy_ext.archive.test_archiver import archived
from tests.support.archives import Rank, export_trial


@pytest.fixture
async def rank(tmp_path: Path) -> AsyncIterator[Rank]:
    """Three archives of two sessions each, and a session that a resume needs."""
    rank = await Rank(tmp_path / "u" / "e" / "t").start()
    for first in "ace":
        await rank.add(first)
        await rank.add(chr(ord(first) + 1))
        assert await rank.archive.sweep() == 2
    await rank.add("needed", SessionState.TRAINED, step=7)
    yield rank
    await rank.stop()


def keep(rank: Rank, last: int) -> None:
    """Let the last of the present files be as much as is kept."""
    files = [rank.folder / "archive" / name for name in rank.files]
    limit = sum(file.stat().st_size for file in files[len(files) - last :])
    rank.archive._limit = lambda: limit


async def contents(rank: Rank) -> list[str]:
    rows = [await rank.journal.session(id) for id in (*"abcdef", "needed")]
    return [row.content for row in rows if row is not None]


def size(rank: Rank) -> int:
    return sum((rank.folder / "archive" / name).stat().st_size for name in rank.files)


async def test_the_oldest_archives_go(rank: Rank) -> None:
    keep(rank, 2)
    await rank.archive.remove_oldest()
    await rank.archive.remove_oldest()
    assert archived(rank) == [*"cdef"]
    assert await contents(rank) == ["deleted"] * 2 + ["archived"] * 4 + ["stored"]
    assert (rank.archive.bytes, rank.archive.removed) == (size(rank), 2)
    row = await rank.journal.session("a")
    assert row is not None and (row.state, row.final_reward) == (SessionState.ABORTED, 2.0)


async def test_what_the_journal_has_is_not_touched_by_a_limit_of_nothing(rank: Rank) -> None:
    keep(rank, 0)
    await rank.archive.remove_oldest()
    assert rank.files == []
    assert await contents(rank) == ["deleted"] * 6 + ["stored"]
    assert len(await rank.journal.interactions("needed")) == 3


async def test_an_export_misses_nothing_that_went(rank: Rank) -> None:
    keep(rank, 1)
    await rank.archive.remove_oldest()
    found = export_trial(rank.folder.parents[2])
    assert (found.code, [line["session"]["id"] for line in found.lines]) == (
        0,
        ["e", "f", "needed"],
    )


async def test_an_export_goes_on_while_a_file_that_it_will_read_goes(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of files is as old as the export."""
    folder = rank.folder / "archive"
    listed = list_archives(folder, 0)
    monkeypatch.setattr(reader, "list_archives", lambda *_: listed)
    keep(rank, 1)
    await rank.archive.remove_oldest()
    found = export_trial(rank.folder.parents[2])
    ids = [line["session"]["id"] for line in found.lines]
    assert (found.code, ids) == (0, ["e", "f", "needed"]), found.said


async def test_an_archive_of_a_lost_journal_takes_no_session_of_its_name_with_it(
    rank: Rank,
) -> None:
    """Derived ids (`rollout.deterministic`) come again in the next journal."""
    await rank.stop()
    (rank.folder / "journal" / "rank-0.sqlite").unlink()
    again = await rank.start()
    for id in "ab":
        await again.add(id, SessionState.TRAINED, step=7)
    keep(again, 0)
    await again.archive.remove_oldest()
    assert again.files == []
    assert [len(await again.journal.interactions(id)) for id in "ab"] == [3, 3]


async def test_a_kill_before_the_file_is_removed_is_made_up_for(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    keep(rank, 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sweep, "remove_file", killed)
        await rank.archive.remove_oldest()
    assert len(rank.files) == 3
    await rank.stop()
    again = await rank.start()
    keep(again, 2)
    await again.archive.remove_oldest()
    assert archived(again) == [*"cdef"]
    assert again.archive.bytes == size(again)


def test_without_a_setting_the_archives_may_fill_a_quarter_of_their_disk(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.archive.mkdir()
    total = shutil.disk_usage(tmp_path).total
    assert archive_limit(load_config(None, [], {}), run) == total / 4
    set_to = load_config(None, ["sessions.archive_bytes=5"], {})
    assert archive_limit(set_to, run) == 5
