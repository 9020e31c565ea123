"""A run's file of results: what a runner that was killed goes on from.

JSON, a line for each event, the first one being the run's header. A line is on the disk before the
runner acts on it: that a session is open, before its agent begins; that it has ended, before it
counts as a result. Lines that come together share a write.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from any_agent.errors import ConfigError
from any_agent.runtime.atomic_files import fsync
from any_agent.sdk.results import RunResult
from any_agent.sdk.run_plan import PlanHeader, RunId

_WRITES_TIMEOUT = 10.0
"""Seconds; a file that is still being written to stays open until the process ends."""
_OPENED, _VOID, _REGROUPED = "opened", "void", "regrouped"
_HEADER = b'{"any_agent_run":'
"""What a file of results begins with."""


@dataclass(slots=True)
class StartedRun:
    """The last attempt at a place that has no result yet."""

    attempt: int
    session_id: str | None
    """None: it is not known whether one was opened, or none was."""


@dataclass(slots=True)
class LoggedRuns:
    """What a file tells of a run."""

    results: dict[RunId, RunResult] = field(default_factory=dict)
    begun: dict[RunId, StartedRun] = field(default_factory=dict)
    regrouped: dict[RunId, tuple[int, int]] = field(default_factory=dict)
    """Of those who are in a later group of their item than the first: which, and its size."""


class ResultsLog:
    """One run's file; without a path nothing is written, and nothing can be resumed.

    Only one runner at a time has it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.header: PlanHeader | None = None
        self.known = LoggedRuns()
        self._file: int | None = None
        self._pending: list[str] = []
        self._written: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None

    # -- start ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Read what is there. ConfigError for a file of somebody else, or in use."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write results to {self.path}: {error.strerror}") from None
        if not _locked(self._file):
            self._close()
            raise ConfigError(
                f"another runner writes to {self.path} now: wait for it, or give this one a file "
                "of its own (results=)"
            ) from None
        try:
            self._read(self.path)
        except BaseException:
            self._close()
            raise
        _open_ones.add(self)

    def _read(self, path: Path) -> None:
        assert self._file is not None
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                self._take(json.loads(line), first=number == 1)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(
                    f"{path} line {number} is no line of a runner's results ({error}): give "
                    "another file (results=), or mend that one"
                ) from None
        if whole < len(content):
            if self.header is None and not _begins(content):
                raise ConfigError(f"{path} holds no results of a runner: give another (results=)")
            # The last line was being written when its runner was killed: it says nothing yet.
            os.ftruncate(self._file, whole)

    def _take(self, line: dict[str, Any], *, first: bool) -> None:
        if first:
            if line.pop("any_agent_run", None) != 1:
                raise ValueError("it does not begin with the header of a run")
            self.header = PlanHeader(**line)
        elif _OPENED in line:
            self.known.begun[_place(line[_OPENED])] = StartedRun(
                line["attempt"], line["session_id"]
            )
        elif _VOID in line:
            self.known.begun[_place(line[_VOID])] = StartedRun(line["attempt"], None)
        elif _REGROUPED in line:
            for place in (members := line[_REGROUPED]):
                self.known.regrouped[_place(place)] = line["generation"], len(members)
        else:
            result = RunResult.of(line)
            self.known.results[RunId(*result.place)] = result

    # -- writing -------------------------------------------------------------------------------

    async def begin(self, header: PlanHeader) -> None:
        """The first line of a new file."""
        self.header = header
        await self._append(header.as_dict())
        if self.path is not None:
            # So that a power cut leaves not only what is in the file, but also its name.
            await asyncio.to_thread(fsync, self.path.absolute().parent)

    async def opened(self, place: RunId, attempt: int, session_id: str) -> None:
        await self._append({_OPENED: _spot(place), "attempt": attempt, "session_id": session_id})

    async def void(self, place: RunId, attempt: int) -> None:
        """Whatever has become of this attempt: it is not asked for again."""
        await self._append({_VOID: _spot(place), "attempt": attempt})

    async def regrouped(self, places: list[RunId], generation: int) -> None:
        await self._append({_REGROUPED: [*map(_spot, places)], "generation": generation})

    async def ended(self, result: RunResult) -> None:
        await self._append(result.as_dict())

    async def end(self) -> None:
        """Write what is left to be written, and let others have the file."""
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=_WRITES_TIMEOUT)
        if self._writer is None:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    async def _append(self, line: dict[str, Any]) -> None:
        """Return when it is on the disk. ConfigError if it cannot be written."""
        if self._file is None:
            return
        self._pending.append(json.dumps(line, ensure_ascii=False, separators=(",", ":")))
        if self._written is None:
            self._written = asyncio.get_running_loop().create_future()
        written = self._written
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())
        # Shielded: it is everybody's whose lines are in the same write.
        await asyncio.shield(written)

    async def _write_all(self) -> None:
        while self._pending:
            lines, self._pending = self._pending, []
            written, self._written = self._written, None
            assert written is not None
            content = "".join(f"{line}\n" for line in lines).encode(errors="replace")
            try:
                await asyncio.to_thread(self._write, content)
            except Exception as error:
                why = getattr(error, "strerror", None) or error
                written.set_exception(ConfigError(f"cannot write results to {self.path}: {why}"))
                # Whether anybody still waits or not.
                with contextlib.suppress(ConfigError):
                    written.result()
            else:
                written.set_result(None)
        self._writer = None

    def _write(self, content: bytes) -> None:
        assert self._file is not None
        before = os.fstat(self._file).st_size
        left = memoryview(content)
        try:
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError:
            # No part of a line stays for the next one to go on in.
            os.ftruncate(self._file, before)
            raise


def _begins(content: bytes) -> bool:
    """Whether this is the beginning of a header: its runner was killed before anything was run."""
    return content.startswith(_HEADER[: len(content)])


def _locked(file: int) -> bool:
    """Whether nobody else has it; where there are no such locks, nobody is taken to."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _spot(place: RunId) -> list[int]:
    return [place.epoch, place.item, place.member]


def _place(spot: Any) -> RunId:
    epoch, item, member = map(int, spot)
    return RunId(epoch, item, member)


_open_ones: weakref.WeakSet[ResultsLog] = weakref.WeakSet()


def _in_child() -> None:
    """A file is its runner's: a process that this forks, and that outlives it, must not hold it."""
    for one in list(_open_ones):
        one._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
