"""Folders and files of a run: its owner's alone, and written completely or not at all.

Their permissions do not depend on the umask: 0700 and 0600. One process writes into a parent folder
at a time: leftovers of a killed writer are removed.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

_PREFIX = ".partial-"

owner_only = partial(os.open, mode=0o600)
"""An ``opener`` for `open`: a file that it creates can be read by its owner alone."""


def make_folder(path: Path) -> None:
    """Create a folder, and the missing ones above it, for their owner alone.

    One that exists keeps its permissions: an owner who shares it has a reason.
    """
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except FileNotFoundError:
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def make_shared_folder(path: Path) -> None:
    """Create a folder, and the missing ones above it, that others may read and nobody else writes.

    Users may share it: one that exists keeps its permissions.
    """
    try:
        path.mkdir(mode=0o755, exist_ok=True)
    except FileNotFoundError:
        make_shared_folder(path.parent)
        path.mkdir(mode=0o755, exist_ok=True)


def create_empty(path: Path) -> None:
    """Create an empty file for its owner alone; SQLite gives its log the same permissions."""
    os.close(owner_only(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))


@contextmanager
def atomic_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder next to ``target`` that becomes ``target`` on leaving.

    On leaving, every file and folder is fsynced, then renamed, then the parent is fsynced. An
    exception in the body leaves the old state. An existing ``target`` is replaced at the very end
    if ``replace``; otherwise FileExistsError is raised. Other users may read as much of it as of
    the parent, which :func:`make_folder` creates for nobody else.
    """
    make_folder(target.parent)
    shared = target.parent.stat().st_mode & 0o055
    for leftover in target.parent.glob(f"{_PREFIX}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
    temporary = target.with_name(f"{_PREFIX}{target.name}")
    temporary.mkdir(mode=0o700)
    try:
        yield temporary
        for folder, _, files in os.walk(temporary):
            for name in files:
                os.chmod(Path(folder, name), 0o600 | shared & 0o044)
                fsync(Path(folder, name))
            os.chmod(folder, 0o700 | shared)
            fsync(Path(folder))
        if target.exists() and not replace:
            raise FileExistsError(f"{target} exists")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # From here on the new folder is complete and is never removed, whatever interrupts the renames.
    if target.exists():
        removed = _removed(target)
        try:
            target.rename(removed)
            temporary.rename(target)
        except BaseException:
            if not target.exists():
                # Restore its name: the next writer removes folders with a temporary name.
                removed.rename(target)
            raise
        shutil.rmtree(removed)
    else:
        temporary.rename(target)
    fsync(target.parent)


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file: after a crash the target is complete, or as it was."""
    make_folder(target.parent)
    partial = target.with_name(f".partial-{target.name}")
    partial.unlink(missing_ok=True)
    create_empty(partial)
    shutil.copyfile(source, partial)
    fsync(partial)
    partial.replace(target)
    fsync(target.parent)


def write_atomic(target: Path, content: str | bytes) -> None:
    """Write a temporary file, fsync it and rename it; text is written as UTF-8."""
    temporary = target.with_name(f"{_PREFIX}{target.name}")
    # A leftover of a killed writer may have other permissions, and be open elsewhere.
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb", opener=owner_only) as file:
            file.write(content.encode() if isinstance(content, str) else content)
        fsync(temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(target.parent)


def create_once(path: Path, text: str) -> None:
    """Create a file completely or not at all; of several processes, the first one writes it."""
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.stem}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    fsync(path.parent)


def append_line(target: Path, line: str) -> None:
    """Append a line, whole or not at all; first end one that a killed writer left incomplete."""
    with open(target, "ab+", buffering=0, opener=owner_only) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        torn = file.read(1) not in (b"", b"\n")
        data = b"\n" * torn + line.encode() + b"\n"
        if file.write(data) < len(data):
            # The disk has space for a part only: it must not keep half a line.
            file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))


def remove_folder(target: Path) -> None:
    """Remove a folder so that it never appears incomplete under its name."""
    removed = _removed(target)
    target.rename(removed)
    shutil.rmtree(removed)


def _removed(target: Path) -> Path:
    path = target.with_name(f"{_PREFIX}removed-{target.name}")
    shutil.rmtree(path, ignore_errors=True)
    return path


def fsync(path: Path) -> None:
    """Flush a file's or a folder's entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
