"""The target of an export: standard output, a file that is replaced atomically, or a device."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from any_agent.errors import ConfigError, StartupError
from any_agent.runtime.atomic_files import fsync, owner_only

_STANDARD = ("-", "/dev/stdout")


class ExportOutput:
    """A target of bytes, as a file; errors show the ``name`` that its user gave."""

    closed = False

    def __init__(self, file: BinaryIO, name: str, kept: str = "") -> None:
        self._file = file
        self._name = name
        self._kept = kept

    def write(self, data: bytes) -> None:
        """Write bytes; StartupError if that fails, BrokenPipeError if the reader left."""
        try:
            self._file.write(data)
        except OSError as error:
            raise self._problem(error) from error

    def finish(self, partial: Path | None = None, target: Path | None = None) -> None:
        """Flush the buffer; then replace the target by the partial file."""
        try:
            self._file.flush()
            if partial is not None and target is not None:
                fsync(partial)
                partial.replace(target)
                fsync(target.parent)
        except OSError as error:
            raise self._problem(error) from error

    def _problem(self, error: OSError) -> Exception:
        if isinstance(error, BrokenPipeError):
            return error
        return StartupError(f"cannot write {self._name}: {error.strerror}{self._kept}")


@contextmanager
def output(name: str) -> Iterator[ExportOutput]:
    """Open the target that ``--out`` names; it is complete when the context ends.

    A plain or new file, or the target of a symlink, has the whole export in the end, or its old
    content after a failure. A pipe or a device is opened and written to.

    Raises:
        ConfigError: nothing can be written under this name.
        StartupError: writing failed, e.g. because the disk is full.
        BrokenPipeError: the reader left.
    """
    if name in _STANDARD:
        out = ExportOutput(sys.stdout.buffer, "the standard output")
        try:
            yield out
            out.finish()
        except (BrokenPipeError, StartupError):
            # At its end Python would try to write the rest, and print another error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise
        return
    target = plain_file(name)
    partial = None if target is None else target.with_name(f".partial-{target.name}")
    try:
        with _opened(name, partial or Path(name)) as file:
            kept = ""
            if target is not None and target.exists():
                # The new content gets the permissions of the old.
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
                kept = "; what was there before is unchanged"
            out = ExportOutput(file, name, kept)
            yield out
            out.finish(partial, target)
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)


@contextmanager
def _opened(name: str, path: Path) -> Iterator[BinaryIO]:
    try:
        file = open(path, "wb", opener=owner_only)  # noqa: SIM115
    except OSError as error:
        where = f" (in {path.parent})" if str(path) != name else ""
        raise StartupError(f"cannot write {name}{where}: {error.strerror}") from error
    try:
        yield file
    finally:
        # A failed write was reported; closing would try and fail once more.
        with suppress(OSError):
            file.close()


def plain_file(name: str) -> Path | None:
    """Return the path of the file to replace or create; None for a pipe or a device.

    ConfigError for a folder, and for a file in a folder that is not there.
    """
    try:
        mode = os.stat(name).st_mode
    except FileNotFoundError:
        mode = None
    except OSError as error:
        raise ConfigError(f"--out {name}: {error.strerror}; name another file") from error
    if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return None
    target = Path(os.path.realpath(name))
    if name == "" or name.endswith("/") or target.is_dir():
        example = os.path.join(name, "sessions.jsonl")
        raise ConfigError(f"--out {name!r} is a folder: name a file in it, such as {example}")
    if mode is not None and not target.exists():
        # The name in /proc belongs to an open file that was deleted.
        return None
    if not target.parent.is_dir():
        raise ConfigError(f"--out {name}: there is no folder {target.parent}; create it first")
    return target
