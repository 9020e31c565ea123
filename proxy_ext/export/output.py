"""Where an export goes: standard output, a file that is replaced whole, or what is no file."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from any_agent.errors import ConfigError, StartupError
from any_agent.runtime.atomic_files import fsync

_STANDARD = ("-", "/dev/stdout")


class ExportOutput:
    """What lines are written to; errors name it as its user did."""

    def __init__(self, file: BinaryIO, name: str, kept: str = "") -> None:
        self._file = file
        self._name = name
        self._kept = kept

    def write(self, line: bytes) -> None:
        """Raises StartupError if that cannot be written, BrokenPipeError if the reader left."""
        try:
            self._file.write(line)
        except OSError as error:
            raise self._problem(error) from error

    def finish(self, partial: Path | None = None, target: Path | None = None) -> None:
        """Write what is buffered; a partial file then takes its target's place."""
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
    """What ``--out`` names; on leaving all of it is written.

    A plain file, or one that is not there yet, holds the whole export or what it held before; of a
    symlink that is the file that it leads to. A pipe, a device or the like is opened and written
    to, and stays what it is.

    Raises:
        ConfigError: nothing can be written where the name says.
        StartupError: it could not be written, e.g. because the disk is full.
        BrokenPipeError: the reader left.
    """
    if name in _STANDARD:
        out = ExportOutput(sys.stdout.buffer, "the standard output")
        try:
            yield out
            out.finish()
        except (BrokenPipeError, StartupError):
            # Python would try to write the rest at its end, and say that it could not.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise
        return
    target = _plain_file(name)
    if target is None:
        with _opened(name, Path(name)) as file:
            out = ExportOutput(file, name)
            yield out
            out.finish()
        return
    partial = target.with_name(f".partial-{target.name}")
    try:
        with _opened(name, partial) as file:
            if target.exists():
                # Who may not read what it holds now may not read what it is to hold.
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            kept = "; what was there before is unchanged" if target.exists() else ""
            out = ExportOutput(file, name, kept)
            yield out
            out.finish(partial, target)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _opened(name: str, path: Path) -> Iterator[BinaryIO]:
    try:
        file = open(path, "wb")  # noqa: SIM115
    except OSError as error:
        where = f" (in {path.parent})" if str(path) != name else ""
        raise StartupError(f"cannot write {name}{where}: {error.strerror}") from error
    try:
        yield file
    finally:
        # What could not be written has been said, and closing would try once more.
        with suppress(OSError):
            file.close()


def _plain_file(name: str) -> Path | None:
    """The file that is to be replaced, or made; None for what is no plain file."""
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
        raise ConfigError(f"--out {name!r} names a folder: name a file in it, like {example}")
    if mode is not None and not target.exists():
        # It was deleted, and is still open under a name in /proc.
        return None
    if not target.parent.is_dir():
        raise ConfigError(f"--out {name}: there is no folder {target.parent}; make it first")
    return target
