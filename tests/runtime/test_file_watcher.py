"""A file that changes while a service runs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from any_agent.errors import ConfigError
from any_agent.runtime.file_watcher import WatchedFile


@pytest.fixture(autouse=True)
def for_the_owner_alone() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def number(content: bytes) -> int:
    return int(content)


def test_a_change_of_a_watched_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "n"
    watched = WatchedFile(path, number, 0, every=0.0)
    assert watched.get() == 0, "there was none"
    path.write_text("1")
    assert watched.get() == 1
    path.with_name("m").write_text("2")
    os.replace(path.with_name("m"), path)
    assert watched.get() == 2


def test_a_change_that_leaves_its_attributes_is_seen(tmp_path: Path) -> None:
    """Two writes within one tick of the file system's clock."""
    path = tmp_path / "n"
    path.write_text("1")
    written = path.stat().st_mtime_ns
    watched = WatchedFile(path, number, 0, every=0.0)
    path.write_text("2")
    os.utime(path, ns=(written, written))
    assert watched.get() == 2


def test_a_watched_file_is_read_no_more_often_than_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "n"
    path.write_text("1")
    watched = WatchedFile(path, number, 0, every=3600.0)
    path.write_text("2")
    assert watched.get() == 1
    assert watched.get(within=0.0) == 2


def _too_many_files(*_: object, **__: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("how", ["broken", "gone", "others may read it", "no descriptor is left"])
def test_a_watched_file_that_breaks_or_goes_keeps_its_last_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = tmp_path / "n"
    path.write_text("1")
    watched = WatchedFile(path, number, 0, every=0.0)
    path.write_text("x" if how == "broken" else "2")
    with monkeypatch.context() as patch:
        if how == "gone":
            path.unlink()
        elif how == "others may read it":
            path.chmod(0o644)
        elif how == "no descriptor is left":
            patch.setattr(os, "open", _too_many_files)
        assert [watched.get() for _ in range(3)] == [1, 1, 1]
    assert len(caplog.records) == 1, "said once"
    path.unlink(missing_ok=True)
    path.write_text("22")
    assert watched.get() == 22


def test_a_change_is_seen_where_what_is_told_of_files_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system, which asks again when a file is opened."""
    path = tmp_path / "n"
    path.write_text("1")
    watched = WatchedFile(path, number, 0, every=0.0)
    old = path.stat()
    path.write_text("22")
    monkeypatch.setattr(os, "stat", lambda *_, **__: old)
    assert watched.get() == 22


def test_a_watched_file_that_is_broken_from_the_start_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "n"
    path.write_text("x")
    with pytest.raises(ValueError):
        WatchedFile(path, number, 0)
    with pytest.raises(ConfigError):
        WatchedFile(tmp_path, number, 0)
