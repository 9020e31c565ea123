"""What no resume needs goes to an archive, once, killed or not; beyond a limit the oldest go."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from any_agent.config import load_config
from any_agent.errors import Conflict, StoreUnavailable
from any_agent.rundir.layout import RunDir
from any_agent.runtime import atomic_files
from any_agent.types import Interaction, SessionState
from proxy_ext.archive import archiver as sweep
from proxy_ext.archive.files import ArchiveWriter, list_archives
from proxy_ext.archive.records import read_record
from proxy_ext.export import reader
from proxy_ext.journal import ArchiveContent, EraseContent, sqlite
from proxy_ext.journal.base import EXPORT_OWNER
from proxy_ext.leases import Fence, LeaseManager
from proxy_ext.service import archive_limit
from tests.proxy_ext.archive.test_files import archives_of
from tests.support.archives import CALLS, Rank, export_trial
from tests.support.errors import fails_with
from tests.support.sessions import unwritable

BOUNDARIES = ("writing", "intended", "unnamed", "named", "before the transaction")
BOUNDARIES += ("after the transaction",)


def archived(rank: Rank) -> list[str]:
    """The sessions in the files, which are as large as the rank knows."""
    folder = rank.folder / "archive"
    assert rank.archive.bytes == sum((folder / name).stat().st_size for name in rank.files)
    return [read_record(line).session["id"] for line in archives_of(folder).all()]


async def content(rank: Rank, id: str) -> str:
    row = await rank.journal.session(id)
    assert row is not None
    assert bool(await rank.journal.interactions(id)) is (row.content == "stored")
    return row.content


async def test_an_ended_session_is_moved_whole_to_the_archive(rank: Rank) -> None:
    await rank.add("a")
    await rank.add("b", SessionState.EVALUATED)
    assert await rank.archive.sweep() == 2
    assert await rank.archive.sweep() == 0
    assert archived(rank) == ["a", "b"]
    assert [await content(rank, id) for id in "ab"] == ["archived", "archived"]
    line = archives_of(rank.folder / "archive").find(1, "a")
    assert line is not None
    record = read_record(line)
    assert [i.reward for i in record.interactions] == [0.0, 0.125, 0.25]
    assert [(r["value"], r["by"], r["at"]) for r in record.rewards][1] == (0.125, "me", 5.0)
    assert record.session["metadata"] == {"é": [1, None]}
    assert (record.session["state"], record.session["final_reward"]) == ("aborted", 2.0)
    # The row stays: its state, its reward, its group's name.
    row = await rank.journal.session("a")
    assert row is not None and (row.state, row.final_reward) == (SessionState.ABORTED, 2.0)


async def test_sessions_needed_by_a_resume_or_ended_lately_are_not_archived(rank: Rank) -> None:
    await rank.add("old", SessionState.TRAINED, step=4)
    await rank.add("new", SessionState.TRAINED, step=5)
    await rank.add("stale", SessionState.REJECTED, step=5)
    await rank.add("unknown", SessionState.TRAINED, owner="trainer")
    await rank.add("dull", SessionState.REJECTED)
    # No resume asks for what was exported: whoever did it trains elsewhere.
    await rank.add("exported", SessionState.TRAINED, owner=EXPORT_OWNER)
    for seconds, moved in ((60, 0), (5, 2)):
        rank.archive.keep_seconds = seconds
        assert await rank.archive.sweep() == moved
    assert archived(rank) == ["dull", "exported"]
    rank.oldest_step = 4
    assert await rank.archive.sweep() == 1
    assert archived(rank) == ["old", "dull", "exported"]
    leases = LeaseManager(rank.sessions, Fence(rank.journal), ttl=60)
    replayed = await leases.replay(["new", "stale"], "again")
    assert [(t.session_id, len(t.interactions)) for t in replayed] == [("new", 3), ("stale", 3)]
    # They are the trainer's again, whatever the oldest checkpoint is by now.
    rank.oldest_step = 9
    assert await rank.archive.sweep() == 0
    with fails_with(Conflict, "old", "archived"):
        await leases.replay(["old"], "again")


async def test_a_sweep_archives_in_bounded_batches(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(7):
        await rank.add(f"s{k}")
    monkeypatch.setattr(sweep, "BATCH", 3)
    assert [await rank.archive.sweep() for _ in range(4)] == [3, 3, 1, 0]
    ends = [name.rpartition("-")[0] for name in rank.files]
    assert ends == ["rank-0-1-3", "rank-0-4-6", "rank-0-7-7"]
    for k in range(7, 10):
        await rank.add(f"s{k}")
    monkeypatch.setattr(sweep, "BATCH_BYTES", 1)
    assert [await rank.archive.sweep() for _ in range(4)] == [1, 1, 1, 0]
    assert rank.archive.sessions == len(archived(rank)) == 10
    await rank.stop()
    again = await rank.start()
    assert again.archive.sessions == len(archived(again)) == 10


async def test_a_replay_waits_for_the_sweep_and_is_refused(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or comes first, and the sweep leaves the session alone."""
    rank.oldest_step = 4
    await rank.add("a", SessionState.TRAINED, step=4)
    leases = LeaseManager(rank.sessions, Fence(rank.journal), ttl=60)
    finish, reached, go = ArchiveWriter.finish, asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(writer: ArchiveWriter) -> int:
        loop.call_soon_threadsafe(reached.set)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(10)
        return finish(writer)

    monkeypatch.setattr(ArchiveWriter, "finish", slow)
    sweeping = asyncio.create_task(rank.archive.sweep())
    await reached.wait()
    replay = asyncio.create_task(leases.replay(["a"], "again"))
    await asyncio.sleep(0)
    go.set()
    assert await sweeping == 1
    with pytest.raises(Conflict):
        await replay
    assert await content(rank, "a") == "archived"


async def test_a_session_that_is_trained_on_again_is_not_archived(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.oldest_step = 4
    await rank.add("a", SessionState.TRAINED, step=4)
    await rank.add("b")
    leases = LeaseManager(rank.sessions, Fence(rank.journal), ttl=60)
    ended = rank.journal.ended

    async def late(**fields: Any) -> Any:
        batch = await ended(**fields)
        await leases.replay(["a"], "again")
        return batch

    monkeypatch.setattr(rank.journal, "ended", late)
    assert await rank.archive.sweep() == 1
    assert archived(rank) == ["b"]
    assert await content(rank, "a") == "stored"


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


async def test_a_failed_write_of_an_archive_is_made_up_for(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id in ("a", "b"):
        await rank.add(id)
    with unwritable(rank.journal, ArchiveContent), pytest.raises(StoreUnavailable):
        await rank.archive.sweep()
    assert rank.archive.sessions == rank.archive.bytes == 0
    assert await content(rank, "a") == "stored"
    await rank.add("c")
    assert await rank.archive.sweep() == 3
    assert archived(rank) == ["a", "b", "c"]
    assert len(rank.files) == 1 and rank.files[0].startswith("rank-0-1-3-")
    # On a full disk all stays in the journal, and nothing is kept of a deletion.
    before = rank.files
    await rank.add("d")
    for target, name, deed in (
        (ArchiveWriter, "add", rank.archive.sweep()),
        (atomic_files, "fsync", rank.archive.remove("a")),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, name, no_room)
            with fails_with(OSError, "No space"):
                await deed
        assert rank.files == before
    assert await rank.archive.sweep() == 1
    assert archived(rank) == [*"abcd"]


async def test_a_session_that_cannot_be_archived_holds_up_no_other(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id in ("a", "b", "c"):
        await rank.add(id)
    unpack = sqlite.unpack_interaction

    def of_a_later_format(data: bytes) -> Interaction:
        if b"a-1" in data:
            raise ValueError("format: 3 is expected")
        return unpack(data)

    monkeypatch.setattr(sqlite, "unpack_interaction", of_a_later_format)
    monkeypatch.setattr(sweep, "BATCH", 1)
    while await rank.archive.sweep() or archived(rank) != ["b", "c"]:
        pass
    assert await rank.archive.sweep() == 0


async def test_sweeps_are_rare_and_come_again_soon_after_a_failure(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may make a file: a day's content is not to be in thousands."""
    waits: list[float] = []
    outcomes = iter([None, None, OSError(28, "full"), None, asyncio.CancelledError()])

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def sweep_all() -> None:
        if outcome := next(outcomes):
            raise outcome

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(rank.archive, "sweep_all", sweep_all)
    rank.archive.keep_seconds = 24 * 3600.0
    with pytest.raises(asyncio.CancelledError):
        await rank.archive.run()
    assert waits == [30.0, 900.0, 900.0, 30.0, 900.0]


async def test_an_archived_session_is_deleted_for_good(rank: Rank) -> None:
    for id in ("a", "b", "c"):
        await rank.add(id)
    await rank.archive.sweep()
    before = rank.archive.bytes
    await rank.archive.remove("b")
    await rank.journal.commit(EraseContent(("b",)))
    assert archived(rank) == ["a", "c"]
    assert await content(rank, "b") == "deleted"
    assert rank.archive.bytes < before
    # As after a crash before the journal knew of it.
    await rank.archive.remove("b")
    await rank.archive.remove("none")
    assert archived(rank) == ["a", "c"]


async def test_a_deletion_beside_a_sweep_counts_both(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id in ("a", "b"):
        await rank.add(id)
    await rank.archive.sweep()
    await rank.add("c")
    removing, swept = threading.Event(), threading.Event()
    remove = sweep.remove_from

    def slow(*arguments: Any) -> int:
        removing.set()
        assert swept.wait(30)
        return remove(*arguments)

    monkeypatch.setattr(sweep, "remove_from", slow)
    removal = asyncio.create_task(rank.archive.remove("b"))
    assert await asyncio.to_thread(removing.wait, 30)
    assert await rank.archive.sweep() == 1
    swept.set()
    await removal
    assert (len(rank.files), archived(rank)) == (2, ["a", "c"])


@pytest.mark.parametrize("where", BOUNDARIES)
@pytest.mark.service
async def test_an_archiver_killed_at_any_boundary_loses_no_session(
    tmp_path: Path, where: str
) -> None:
    rank = await Rank(tmp_path, oldest_step=99).start()
    for k in range(5):
        await rank.add(f"s{k}", SessionState.TRAINED, step=k)
    await rank.stop()
    for _ in range(2):  # and once more while it recovers
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.support.archive_killed", str(tmp_path), where),
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
        if where != "after the transaction":
            assert process.returncode == -signal.SIGKILL, said
    rank = await rank.start()
    # Meanwhile there is more: the next file would be another one.
    await rank.add("late", SessionState.TRAINED, step=9)
    while await rank.archive.sweep():
        pass
    assert archived(rank) == [*(f"s{k}" for k in range(5)), "late"]
    assert rank.archive.sessions == 6
    for line in archives_of(tmp_path / "archive").all():
        assert len(read_record(line).interactions) == CALLS
    assert not [name for name in rank.files if name.startswith(".")]
    assert len(rank.files) == (2 if where == "after the transaction" else 1)
    await rank.stop()


async def test_the_journal_does_not_grow_for_ever(rank: Rank) -> None:
    sizes = []
    for turn in range(8):
        for k in range(20):
            await rank.add(f"s{turn}-{k}", text="x" * 20_000)
        await rank.archive.sweep_all()
        sizes.append(rank.journal.size())
    # What one turn needed, the next one uses again; rows without content are small.
    assert sizes[-1] < 2 * sizes[0]
    assert rank.archive.sessions == 160
    while await rank.journal.trim():
        pass
    await rank.stop()
    assert rank.journal.size() < sizes[0] / 4
    await rank.start()


@pytest.fixture
async def full(rank: Rank) -> Rank:
    """Three archives of two sessions each, and a session that a resume needs."""
    for two in ("ab", "cd", "ef"):
        for id in two:
            await rank.add(id)
        assert await rank.archive.sweep() == 2
    await rank.add("needed", SessionState.TRAINED, step=7)
    return rank


def keep(full: Rank, last: int) -> None:
    """Let the last of the present files be as much as is kept."""
    files = [full.folder / "archive" / name for name in full.files]
    limit = sum(file.stat().st_size for file in files[len(files) - last :])
    full.archive.limit = lambda: limit


async def contents(full: Rank) -> list[str]:
    return [await content(full, id) for id in (*"abcdef", "needed")]


async def test_above_the_limit_the_oldest_archives_are_removed(
    full: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(full, 2)
    await full.archive.remove_oldest()
    await full.archive.remove_oldest()
    assert archived(full) == [*"cdef"]
    assert await contents(full) == ["deleted"] * 2 + ["archived"] * 4 + ["stored"]
    assert full.archive.removed == 2
    row = await full.journal.session("a")
    assert row is not None and (row.state, row.final_reward) == (SessionState.ABORTED, 2.0)
    # What the journal has is not touched by a limit of nothing.
    keep(full, 0)
    with monkeypatch.context() as patched, pytest.raises(OSError):
        # As a kill before the file is removed, it is made up for.
        patched.setattr(sweep, "remove_file", no_room)
        await full.archive.remove_oldest()
    assert len(full.files) == 2
    await full.archive.remove_oldest()
    assert full.files == []
    assert await contents(full) == ["deleted"] * 6 + ["stored"]
    assert len(await full.journal.interactions("needed")) == 3


async def test_an_export_goes_on_while_a_file_that_it_will_read_goes(
    full: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of files is as old as the export."""
    folder = full.folder / "archive"
    listed = list_archives(folder, 0)
    monkeypatch.setattr(reader, "list_archives", lambda *_: listed)
    keep(full, 1)
    await full.archive.remove_oldest()
    found = export_trial(full.folder.parents[2])
    assert (found.code, found.ids) == (0, ["e", "f", "needed"]), found.said


async def test_an_archive_of_a_lost_journal_takes_no_session_of_its_name_with_it(
    full: Rank,
) -> None:
    """Derived ids (`rollout.deterministic`) come again in the next journal."""
    await full.stop()
    (full.folder / "journal" / "rank-0.sqlite").unlink()
    again = await full.start()
    for id in "ab":
        await again.add(id, SessionState.TRAINED, step=7)
    keep(again, 0)
    await again.archive.remove_oldest()
    assert again.files == []
    assert [len(await again.journal.interactions(id)) for id in "ab"] == [3, 3]


def test_without_a_setting_the_archives_may_fill_a_quarter_of_their_disk(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.archive.mkdir()
    total = shutil.disk_usage(tmp_path).total
    assert archive_limit(load_config(None, [], {}), run) == total / 4
    set_to = load_config(None, ["sessions.archive_bytes=5"], {})
    assert archive_limit(set_to, run) == 5
