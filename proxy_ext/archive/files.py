"""Archive files: `rank-<rank>-<first>-<last>-<token>.jsonl.gz`, by the sessions' numbers.

The token is random: no file is ever overwritten, even if a journal is lost and its numbers repeat.

Each line is a gzip member of its own, so that `zcat` reads the file, and a reader loses one line to
damage and goes on with the next. The first line describes the file; each other line is a record
(:mod:`proxy_ext.archive.records`), ordered by number. A file changes only when a session is removed
from it.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import secrets
import zlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from any_agent.runtime.atomic_files import fsync, make_folder, owner_only, write_atomic

FORMAT = 1
_NAME = re.compile(r"rank-(\d+)-(\d+)-(\d+)-[0-9a-f]+\.jsonl\.gz")
_HEAD = re.compile(rb'\{"number":(\d+),"session":\{"id": "([^"\\]*)"')
"""The beginning of a record, as :func:`proxy_ext.archive.records.record_line` writes it."""
_MEMBER = b"\x1f\x8b\x08"
_GZIP = 31  # zlib's number for gzip's framing, with its checksum
_CHUNK = 65_536
_PARTIAL = ".partial-"  # prefix of unfinished files, also of those of `write_atomic`

Report = Callable[[str], None]
"""A callback that gets a description of damage."""


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """An archive file; its sessions' numbers lie between ``first`` and ``last``."""

    path: Path
    first: int
    last: int


def list_archives(folder: Path, rank: int) -> list[ArchiveFile]:
    """Return a rank's files, ordered by their first number."""
    if not folder.is_dir():
        return []
    matches = ((path, _NAME.fullmatch(path.name)) for path in folder.iterdir())
    found = [ArchiveFile(p, int(m[2]), int(m[3])) for p, m in matches if m and int(m[1]) == rank]
    return sorted(found, key=lambda file: (file.first, file.last))


class ArchiveWriter:
    """Writes one file under a temporary name, until :meth:`finish` moves it to its place."""

    def __init__(self, folder: Path, rank: int, about: dict[str, Any]) -> None:
        make_folder(folder)
        self._folder = folder
        self._rank = rank
        self.partial = folder / f"{_PARTIAL}rank-{rank}-new"
        self._file = open(self.partial, "wb", opener=owner_only)  # noqa: SIM115
        self._token = secrets.token_hex(4)
        self._numbers: list[int] = []
        self.raw = 0
        """Uncompressed bytes of the lines."""
        self._write(orjson.dumps({"archive": FORMAT, "rank": rank, **about}) + b"\n")

    @property
    def name(self) -> str:
        """The name of the complete file."""
        ends = f"{self._numbers[0]}-{self._numbers[-1]}"
        return f"rank-{self._rank}-{ends}-{self._token}.jsonl.gz"

    def add(self, number: int, line: bytes) -> None:
        """Add a line; numbers must ascend."""
        self._numbers.append(number)
        self._write(line)

    def _write(self, line: bytes) -> None:
        self.raw += len(line)
        self._file.write(zlib.compress(line, wbits=_GZIP))

    def finish(self) -> int:
        """Write the file to disk under its name, and return its size in bytes."""
        self._file.close()
        fsync(self.partial)
        size = self.partial.stat().st_size
        self.partial.replace(self._folder / self.name)
        fsync(self._folder)
        return size

    def abandon(self) -> None:
        """Remove the file if it is not finished."""
        # A failed write fails once more when the file is closed.
        with contextlib.suppress(OSError):
            self._file.close()
        self.partial.unlink(missing_ok=True)


def remove_partial(folder: Path, rank: int) -> None:
    """Remove the unfinished files of a killed process."""
    for path in folder.glob(f"{_PARTIAL}rank-{rank}-*"):
        path.unlink()


def remove_file(path: Path) -> None:
    """Remove a file durably, if it exists."""
    if path.exists():
        path.unlink()
        fsync(path.parent)


def remove_from(file: ArchiveFile, session_ids: Collection[str], report: Report) -> int:
    """Remove sessions from a file, and return the bytes saved; 0 if the file has none of them.

    Damaged parts are kept as they are, as another tool may still read them.
    """
    data = file.path.read_bytes()
    kept, found, others = [], False, False
    for start, end, line in _members(data):
        head = None if line is None else head_of(line)
        if head is not None and head.session_id in session_ids:
            found = True
            continue
        if line is None:
            report(f"{file.path.name}: damaged at byte {start}")
        others = others or line is None or head is not None
        kept.append(data[start:end])
    if not found:
        return 0
    if others:
        write_atomic(file.path, b"".join(kept))
    else:
        remove_file(file.path)
    return len(data) - (sum(map(len, kept)) if others else 0)


class ArchiveHeader(NamedTuple):
    """The session of a line."""

    number: int
    session_id: str


def head_of(line: bytes) -> ArchiveHeader | None:
    """Return the beginning of a record; None for the line that describes the file."""
    match = _HEAD.match(line)
    return ArchiveHeader(int(match[1]), match[2].decode()) if match else None


def sessions_in(file: ArchiveFile, report: Report) -> list[str]:
    """Return the ids of the readable sessions in a file."""
    heads = map(head_of, read_lines(file.path, report))
    return [head.session_id for head in heads if head is not None]


def first_session(file: ArchiveFile, report: Report) -> str | None:
    """Return the id of the first readable session in a file."""
    heads = map(head_of, read_lines(file.path, report))
    return next((head.session_id for head in heads if head is not None), None)


def read_lines(path: Path, report: Report) -> Iterator[bytes]:
    """Iterate over the lines of a file, the first one included; report and skip damage.

    A file that was removed meanwhile has none: its sessions are deleted.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return
    with file:
        try:
            data: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            data = b""
    for start, _, line in _members(data):
        if line is None:
            report(f"{path.name}: damaged at byte {start}; later lines may be readable")
        else:
            yield line


def _members(data: mmap.mmap | bytes) -> Iterator[tuple[int, int, bytes | None]]:
    """Iterate over the members: start, end, and content, which is None for unreadable bytes."""
    at, size = 0, len(data)
    while at < size:
        end, line = _member(data, at)
        if line is None:
            # Bytes that look like a member inside damaged ones fail their checksum.
            end = data.find(_MEMBER, at + 1)
            while end >= 0 and _member(data, end)[1] is None:
                end = data.find(_MEMBER, end + 1)
            end = size if end < 0 else end
        yield at, end, line
        at = end


def _member(data: mmap.mmap | bytes, start: int) -> tuple[int, bytes | None]:
    inflate = zlib.decompressobj(wbits=_GZIP)
    parts, at = [], start
    try:
        while not inflate.eof and at < len(data):
            chunk = data[at : at + _CHUNK]
            parts.append(inflate.decompress(chunk))
            at += len(chunk)
    except zlib.error:
        return start, None
    if not inflate.eof:
        return start, None
    return at - len(inflate.unused_data), b"".join(parts)


class ArchiveFolder:
    """Archives of a rank, read in one pass in the order of numbers.

    ``list_files`` returns them; it is called again if a session is missing, as more files may have
    been written meanwhile.
    """

    def __init__(self, list_files: Callable[[], list[ArchiveFile]], report: Report) -> None:
        self._list_files = list_files
        self._report = report
        self._seen: set[Path] = set()
        self._waiting: list[ArchiveFile] = []
        self._open: list[_Cursor] = []
        self._add_new_files()

    def find(self, number: int, session_id: str) -> bytes | None:
        """Return a session's line, or None. The numbers of successive calls must ascend."""
        for _ in range(2):
            for cursor in self._seek(number):
                if cursor.head == (number, session_id):
                    return cursor.line
            if not self._add_new_files():
                break
        return None

    def all(self) -> Iterator[bytes]:
        """Iterate over all sessions' lines, each session once."""
        number = 0
        while self._waiting or self._open:
            same = {cursor.head: cursor.line for cursor in self._seek(number)}
            for head, line in same.items():
                if head.number == number:
                    yield line
            ahead = [cursor.head.number for cursor in self._open]
            ahead += [file.first for file in self._waiting[:1]]
            number = max(number + 1, min(ahead, default=0))

    def _seek(self, number: int) -> list[_Cursor]:
        """Move every open file to its first session with at least this number."""
        while self._waiting and self._waiting[0].first <= number:
            self._open.append(_Cursor(self._waiting.pop(0), self._report))
        self._open = [cursor for cursor in self._open if cursor.seek(number)]
        return self._open

    def _add_new_files(self) -> bool:
        new = [file for file in self._list_files() if file.path not in self._seen]
        self._seen.update(file.path for file in new)
        self._waiting = sorted([*self._waiting, *new], key=lambda file: file.first)
        return bool(new)


class _Cursor:
    """A position in one file."""

    def __init__(self, file: ArchiveFile, report: Report) -> None:
        self._lines = read_lines(file.path, report)
        self.line = b""
        self.head = ArchiveHeader(-1, "")

    def seek(self, number: int) -> bool:
        """Move to the first session with at least this number; False if there is none."""
        while self.head.number < number:
            line = next(self._lines, None)
            if line is None:
                return False
            head = head_of(line)
            if head is not None:
                self.line, self.head = line, head
        return True
