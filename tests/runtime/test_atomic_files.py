"""Folders that are replaced: whatever interrupts it, one whole state stays under the name.

And lines that are added: half a line spoils no other one.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from any_agent.runtime import atomic_files as atomic
from any_agent.runtime.atomic_files import (
    append_line,
    atomic_folder,
    make_folder,
    remove_folder,
    write_atomic,
)
from any_agent.runtime.disk_space import is_disk_full
from tests.support.errors import fails_with
from tests.support.small_disk import small_disk

INTERRUPTIONS = pytest.mark.parametrize("error", [OSError, SystemExit, KeyboardInterrupt])


def write(target: Path, text: str, *, replace: bool = False) -> None:
    with atomic_folder(target, replace=replace) as folder:
        (folder / "file").write_text(text)


def read(target: Path) -> str:
    return (target / "file").read_text()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    target = tmp_path / "folders" / "it"
    write(target, "old")
    return target


def test_what_exists_is_not_replaced_unasked(target: Path) -> None:
    for replace, text in ((False, "old"), (True, "new")):
        with nullcontext() if replace else pytest.raises(FileExistsError):
            write(target, "new", replace=replace)
        assert read(target) == text
        assert list(target.parent.iterdir()) == [target]


@INTERRUPTIONS
def test_a_folder_interrupted_while_it_is_written_keeps_the_old_one(
    target: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), atomic_folder(target, replace=True) as folder:
        (folder / "file").write_text("half")
        raise error
    assert read(target) == "old"
    assert list(target.parent.iterdir()) == [target]


@INTERRUPTIONS
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_folder_interrupted_at_a_rename_stays_whole(
    target: Path,
    call: int,
    after: bool,
    error: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Just before or just after it took effect."""
    rename, calls = Path.rename, 0

    def interrupted(self: Path, to: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls != call:
            return rename(self, to)
        if after:
            rename(self, to)
        raise error

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(error):
        write(target, "new", replace=True)
    monkeypatch.undo()
    whole = "new" if (call, after) == (2, True) else "old"
    assert read(target) == whole
    # The next writer clears what is left, and only that.
    write(target.with_name("other"), "other")
    assert sorted(p.name for p in target.parent.iterdir()) == ["it", "other"]
    assert read(target) == whole
    write(target, "newer", replace=True)
    assert read(target) == "newer"


def test_a_removed_folder_is_gone_at_once(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, **_: object) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr("any_agent.runtime.atomic_files.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(target)
    assert not target.exists()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "new\n"),
        ("", "new\n"),
        ("old\n", "old\nnew\n"),
        ("old\nhal", "old\nhal\nnew\n"),
        ("é", "é\nnew\n"),
    ],
)
def test_an_appended_line_starts_on_a_line_of_its_own(
    tmp_path: Path, before: str | None, after: str
) -> None:
    path = tmp_path / "lines"
    if before is not None:
        path.write_text(before, encoding="utf-8")
    append_line(path, "new")
    assert path.read_text(encoding="utf-8") == after


def test_half_a_line_is_not_kept_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        path = disk.folder / "lines"
        append_line(path, "first")
        disk.fill()
        with pytest.raises(OSError) as raised:
            append_line(path, "x" * 20_000)
        assert is_disk_full(raised.value)
        assert path.read_text() == "first\n"
        disk.make_room()
        append_line(path, "second")
        assert path.read_text() == "first\nsecond\n"


def test_nothing_is_left_of_a_text_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "state.json"
    write_atomic(target, "old")

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "fsync", full)
    with fails_with(OSError, "No space"):
        write_atomic(target, "new")
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_text() == "old"


def test_a_link_in_place_of_the_temporary_file_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that appears after leftovers were removed."""
    elsewhere, link = tmp_path / "elsewhere", tmp_path / ".partial-keys.json"
    elsewhere.write_text("old")

    def unlink(path: Path, missing_ok: bool = False) -> None:
        assert path == link
        link.symlink_to(elsewhere)
        monkeypatch.undo()

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "keys.json", "secret")
    assert elsewhere.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


@pytest.mark.parametrize("umask", [0, 0o077])
def test_permissions_do_not_depend_on_who_started_it(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        make_folder(tmp_path / "a" / "b")
        write_atomic(tmp_path / "a" / "file", "x")
        append_line(tmp_path / "a" / "lines", "x")
        with atomic_folder(tmp_path / "a" / "b" / "folder") as folder:
            (folder / "within").mkdir()
            (folder / "within" / "file").write_text("x")
    finally:
        os.umask(before)
    assert modes(tmp_path / "a") == {0o700, 0o600}


def modes(top: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in (top, *top.rglob("*"))}


def test_what_an_owner_shares_stays_shared(tmp_path: Path) -> None:
    """An engine under another uid may read each new version once its folder is open to it."""
    weights = tmp_path / "weights"
    make_folder(weights)
    weights.chmod(0o750)
    make_folder(weights)
    with atomic_folder(weights / "v1") as folder:
        (folder / "file").write_text("x")
    assert (weights.stat().st_mode & 0o777, modes(weights / "v1")) == (0o750, {0o750, 0o640})
