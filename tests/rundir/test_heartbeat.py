"""What a part with an event loop tells the others of itself, and for how long."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from any_agent.rundir import registry as presence
from any_agent.rundir.registry import Heartbeat, RegistryEntry
from any_agent.runtime.file_watcher import WatchedPath
from tests.support.presence import Part, entry, quick, version
from tests.support.proxy import until

__all__ = ["quick"]
pytestmark = pytest.mark.usefixtures("quick")


async def test_a_heartbeat_is_written_at_once_repeatedly_and_at_the_end(tmp_path: Path) -> None:
    rank = Part()
    here = Heartbeat(tmp_path, rank)
    await here.begin()
    assert version(tmp_path) == 1
    await until(lambda: version(tmp_path) >= 4)
    await here.end()
    last = entry(tmp_path)
    assert last is not None
    assert (last.state, last.version) == ("stopping", rank.told), "nothing comes after that"


async def test_a_failed_beat_does_not_stop_the_next(tmp_path: Path) -> None:
    """Who falls silent is taken for dead."""
    folder, part = tmp_path / "registry", Part()

    def describe() -> RegistryEntry:
        entry = part()
        if entry.version < 4:
            raise RuntimeError("planted")
        return entry

    here = Heartbeat(folder, describe)
    await here.begin()
    # The disk takes nothing, either.
    await until(lambda: part.told >= 8)
    folder.mkdir()
    await until(lambda: version(folder))
    folder.rename(tmp_path / "gone")
    await here.end()


async def test_a_loop_that_hangs_falls_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    monkeypatch.setattr(presence, "publish", lambda _, entry: written.append(entry))
    here = Heartbeat(tmp_path, Part())
    await here.begin()
    await until(lambda: len(written) >= 2)
    before = len(written)
    # The loop's own thread, for as long as many beats.
    threading.Event().wait(0.3)
    assert len(written) <= before + 1
    await here.end()


async def test_writing_a_heartbeat_does_not_block_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may take its time; the calls of a rank must not wait for it."""
    writers: list[threading.Thread] = []
    monkeypatch.setattr(presence, "publish", lambda *_: writers.append(threading.current_thread()))
    here = Heartbeat(tmp_path, Part())
    await here.begin()
    await here.end()
    assert len(writers) >= 2
    assert threading.current_thread() not in writers


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
async def test_a_run_that_goes_is_noticed_once_and_nothing_is_written_elsewhere(
    tmp_path: Path, how: str
) -> None:
    run, rank, reasons = tmp_path / "run", Part(), list[str]()
    folder = run / "registry"
    folder.mkdir(parents=True)
    here = Heartbeat(folder, rank, on_lost=reasons.append)
    await here.begin()
    await until(lambda: rank.told >= 3)
    assert reasons == []
    if how == "removed":
        shutil.rmtree(run)
    else:
        run.rename(tmp_path / "elsewhere")
    if how == "replaced":
        folder.mkdir(parents=True)
    await until(lambda: reasons)
    told = rank.told
    await asyncio.sleep(0.1)
    await here.end()
    assert len(reasons) == 1 and str(run) in reasons[0]
    assert rank.told == told and version(folder) == 0


def test_an_entry_goes_to_the_folder_that_was_seen(tmp_path: Path) -> None:
    """Another one may have its name by the time of the write."""
    folder, elsewhere = tmp_path / "registry", tmp_path / "elsewhere"
    folder.mkdir()
    watched = WatchedPath(folder)
    folder.rename(elsewhere)
    folder.mkdir()
    presence.publish(watched.held, Part()())
    watched.close()
    assert not list(folder.iterdir()) and list(elsewhere.iterdir())


async def test_a_folder_that_cannot_be_seen_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system is like that, whose server is away for a while."""
    watched = WatchedPath(tmp_path)

    def away(*_: object, **__: object) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", away)
        assert not watched.is_gone()
    watched.close()
    assert not watched.is_gone()
