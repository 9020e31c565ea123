"""Results and progress of an agent's runs, and the file from which a runner that was killed
resumes.

The file has a JSON object per line, the run's header first, then an event each. A line is on the
disk before the runner acts on it: the opening of a session before its agent begins, the end of a
session before it counts as a result. Concurrent lines share a write."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

from any_agent.errors import ConfigError
from any_agent.runtime.atomic_files import fsync
from any_agent.sdk.run_plan import PlanHeader, RunId

RunState: TypeAlias = Literal["finalized", "awaiting_reward", "evaluated", "failed"]
_STATES = get_args(RunState)
_WRITE_TIMEOUT = 10.0
"""Seconds; a file that is still being written to stays open until the process ends."""
_OPENED, _VOID, _REGROUPED = "opened", "void", "regrouped"
_HEADER = b'{"any_agent_run":'  # the first bytes of a file of results


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of the agent on one item: one session, or, after failures, its last one."""

    item: int
    """The item's index in the dataset, from 0."""
    epoch: int
    """The pass over the dataset, from 0."""
    member: int
    """The number among the item's runs, from 0 to below the group's size."""
    state: RunState
    """The end of its session: `finalized` (train), `evaluated` (eval), `awaiting_reward` where
    another caller gives the reward, or `failed`, with ``error`` and ``code``."""
    reward: float | None = None
    """The session's final reward plus that of its last rewarded completion; None without any."""
    session_id: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    attempts: int = 1
    """The number of sessions that were opened for it."""
    seconds: float = 0.0
    """Seconds from the last attempt's opened session to its end."""
    error: str | None = None
    code: str | None = None
    """The kind of error: `agent_failed`, `agent_timeout`, `invalid_reward`, `no_model_call`, ..."""
    version: int | None = None
    """The newest weight version that it sampled from."""

    @property
    def ok(self) -> bool:
        return self.state != "failed"

    @property
    def place(self) -> RunId:
        """Epoch, item and member, which identify a result."""
        return RunId(self.epoch, self.item, self.member)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON, without the fields that are None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, data: dict[str, Any]) -> Self:
        """Return the result of :meth:`as_dict`; ValueError for any other dictionary."""
        known = {field.name for field in fields(cls)}
        try:
            found = cls(**{name: value for name, value in data.items() if name in known})
        except TypeError as error:
            raise ValueError(str(error)) from None
        if found.state not in _STATES or not all(isinstance(n, int) for n in found.place):
            raise ValueError(f"{found.state!r} is no state of a result")
        return found


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts and means of a run's results."""

    runs: int
    """Results, one for each epoch, item and member."""
    ok: int
    failed: int
    mean: float | None
    """The mean of the existing rewards; None without any."""
    reasons: dict[str, int]
    """Failed runs by error code."""
    stopped: str | None
    """The reason why the runner ended early; None if all runs were made."""

    def __str__(self) -> str:
        text = f"{self.runs} runs: {self.ok} ok"
        if self.failed:
            why = ", ".join(f"{count} {code}" for code, count in self.reasons.items())
            text += f", {self.failed} failed ({why})"
        if self.mean is not None:
            text += f"; mean reward {self.mean:.4g}"
        return f"{text}; stopped: {self.stopped}" if self.stopped else text


class RunResults(list[RunResult]):
    """The results of a run in the order of epochs, items and members.

    ``stopped`` says why the runner ended early (training has finished, say); None: all runs were
    made. ``run`` is the run's name, with which its groups' ids begin.
    """

    def __init__(
        self, results: Iterable[RunResult] = (), *, run: str = "", stopped: str | None = None
    ) -> None:
        super().__init__(sorted(results, key=lambda result: result.place))
        self.run = run
        self.stopped = stopped

    @property
    def failed(self) -> list[RunResult]:
        return [result for result in self if not result.ok]

    @property
    def rewards(self) -> list[float]:
        """The rewards of the runs that have one, in their order."""
        return [result.reward for result in self if result.reward is not None]

    @property
    def mean(self) -> float | None:
        """The mean of :attr:`rewards`; None without any."""
        rewards = self.rewards
        return math.fsum(rewards) / len(rewards) if rewards else None

    def of_item(self, item: int, epoch: int = 0) -> list[RunResult]:
        """Return an item's runs."""
        return [result for result in self if (result.item, result.epoch) == (item, epoch)]

    def summary(self) -> Summary:
        failed = self.failed
        reasons = Counter(result.code or "failed" for result in failed)
        return Summary(
            runs=len(self),
            ok=len(self) - len(failed),
            failed=len(failed),
            mean=self.mean,
            reasons=dict(reasons.most_common()),
            stopped=self.stopped,
        )


@dataclass(slots=True)
class RunProgress:
    """Counts of runs; each is one member of an item's group in one epoch."""

    total: int
    done: int = 0
    failed: int = 0
    """The number of failed runs among the done ones."""
    running: int = 0
    rewarded: int = 0
    rewards: float = 0.0
    """The sum of the rewards so far."""

    @property
    def mean(self) -> float | None:
        """The mean reward so far; None before the first."""
        return self.rewards / self.rewarded if self.rewarded else None


@dataclass(slots=True)
class StartedRun:
    """The last attempt at a run without a result."""

    attempt: int
    session_id: str | None
    """The opened session; None if no session was opened, or if that is unknown."""


class ResultsLog:
    """One run's file, locked by one runner at a time; without a path nothing is written, and
    nothing can be resumed. ``results``, ``started`` and ``groups`` are its content when it was
    opened."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.header: PlanHeader | None = None
        self.results: dict[RunId, RunResult] = {}
        self.started: dict[RunId, StartedRun] = {}
        self.groups: dict[RunId, tuple[int, int]] = {}
        """The generation and the size of the group of each run that is in a later group of its
        item."""
        self._file: int | None = None
        self._pending: list[str] = []
        self._written: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Lock and read the file; ConfigError if it is in use, or has other content."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write results to {self.path}: {error.strerror}") from None
        if not _lock(self._file):
            self._release()
            raise ConfigError(
                f"another runner is writing to {self.path}: wait for it, or give this runner its "
                "own file (results=)"
            ) from None
        try:
            self._read(self.path)
        except BaseException:
            self._release()
            raise
        _open_logs.add(self)

    def _read(self, path: Path) -> None:
        assert self._file is not None
        content = path.read_bytes()
        complete = content.rfind(b"\n") + 1
        lines = content[:complete].splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                self._parse_line(json.loads(line), first=number == 1)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(
                    f"{path} line {number} is not a line of a runner's results ({error}): give "
                    "another file (results=), or correct that line"
                ) from None
        if complete < len(content):
            # The prefix of a header is left by a runner that was killed before any run began.
            if self.header is None and not content.startswith(_HEADER[: len(content)]):
                raise ConfigError(f"{path} has no results of a runner: name another (results=)")
            # The runner was killed while it wrote the last line, which does not count.
            os.ftruncate(self._file, complete)

    def _parse_line(self, line: dict[str, Any], *, first: bool) -> None:
        if first:
            if line.pop("any_agent_run", None) != 1:
                raise ValueError("it does not begin with the header of a run")
            self.header = PlanHeader(**line)
        elif _OPENED in line:
            run = RunId(*map(int, line[_OPENED]))
            self.started[run] = StartedRun(line["attempt"], line["session_id"])
        elif _VOID in line:
            self.started[RunId(*map(int, line[_VOID]))] = StartedRun(line["attempt"], None)
        elif _REGROUPED in line:
            for run in (members := line[_REGROUPED]):
                self.groups[RunId(*map(int, run))] = line["generation"], len(members)
        else:
            result = RunResult.of(line)
            self.results[result.place] = result

    async def begin(self, header: PlanHeader) -> None:
        """Write the first line of a new file."""
        self.header = header
        await self._append(header.as_dict())
        if self.path is not None:
            # After a power cut the file must still have its name.
            await asyncio.to_thread(fsync, self.path.absolute().parent)

    async def opened(self, run: RunId, attempt: int, session_id: str) -> None:
        await self._append({_OPENED: run, "attempt": attempt, "session_id": session_id})

    async def void(self, run: RunId, attempt: int) -> None:
        """Record that the attempt is over, so that its session is not looked up again."""
        await self._append({_VOID: run, "attempt": attempt})

    async def regrouped(self, runs: list[RunId], generation: int) -> None:
        await self._append({_REGROUPED: runs, "generation": generation})

    async def ended(self, result: RunResult) -> None:
        await self._append(result.as_dict())

    async def close(self) -> None:
        """Write the pending lines, and release the file to others."""
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=_WRITE_TIMEOUT)
        if self._writer is None:
            self._release()

    def _release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    async def _append(self, line: dict[str, Any]) -> None:
        """Return when the line is on the disk; ConfigError if it cannot be written."""
        if self._file is None:
            return
        self._pending.append(json.dumps(line, ensure_ascii=False, separators=(",", ":")))
        if self._written is None:
            self._written = asyncio.get_running_loop().create_future()
        written = self._written
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_pending())
        # Shielded: all lines of one write share the future.
        await asyncio.shield(written)

    async def _write_pending(self) -> None:
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
                # Retrieve it, so that asyncio does not log it if no caller waits any more.
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
            # The next line must not continue a part of this one.
            os.ftruncate(self._file, before)
            raise


def _lock(file: int) -> bool:
    """Lock a file; return False if another process has. Systems without such locks return True."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


_open_logs: weakref.WeakSet[ResultsLog] = weakref.WeakSet()


def _release_in_child() -> None:
    """Release the files in a forked process, which may outlive the runner."""
    for log in list(_open_logs):
        log._release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
