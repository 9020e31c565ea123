"""One program that `any-agent run` starts: its output in files, and nothing of it left at its end.

It is in a session of its own, so that it and what it starts are one process group. What leaves the
group (a tool that makes itself a daemon, a detached child of Node's) is found by the mark in its
environment, where the system shows that (Linux), and is ended, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from any_agent.errors import AgentFailed
from any_agent.runtime.parent_death import die_with_parent

_POLL_INTERVAL = 0.05
"""Seconds between two looks at whether it has ended."""
_GRACE = 3.0
"""Seconds that SIGTERM leaves it before SIGKILL."""
_REAPED_TIMEOUT = 5.0
_SWEEPS = 10
MAX_OUTPUT = 2**30
"""Bytes that it may print before it is ended: a program that only prints would fill the disk."""


@dataclass(frozen=True, slots=True)
class Program:
    """What to run. ``mark`` is a ``NAME=value`` of its environment that no other run has."""

    argv: Sequence[str]
    env: Mapping[str, str]
    mark: str
    stdout: Path
    stderr: Path
    stdin: Path = Path(os.devnull)


@dataclass(frozen=True, slots=True)
class ProgramExit:
    """How it ended: by itself with ``code`` (negative: by that signal), or by us, for a reason."""

    code: int | None
    seconds: float
    cut_off: str | None = None

    @property
    def well(self) -> bool:
        return self.code == 0 and self.cut_off is None

    def __str__(self) -> str:
        if self.cut_off is not None:
            return self.cut_off
        assert self.code is not None
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        return f"was killed by {_signal_name(-self.code)}"


async def run_program(program: Program, *, limit: float) -> ProgramExit:
    """Run it to its end, or for ``limit`` seconds. AgentFailed where it cannot be started.

    However this is left, also by being cancelled, nothing of it is running any more.
    """
    began = time.monotonic()
    child = _start(program)
    cut_off = None
    try:
        cut_off = await _watched(child, program, began + limit, limit)
        if cut_off is not None:
            await _asked_to_end(child)
    except asyncio.CancelledError:
        await _asked_to_end(child)
        raise
    finally:
        # Before it is reaped: after that, the group's number may be another one's.
        _signal_group(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_REAPED_TIMEOUT)
        _end_strays(program.mark)
    code = child.returncode if cut_off is None else None
    return ProgramExit(code, time.monotonic() - began, cut_off)


def _start(program: Program) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    with contextlib.ExitStack() as files:
        stdin = files.enter_context(open(program.stdin, "rb"))
        stdout = files.enter_context(open(program.stdout, "wb"))
        stderr = files.enter_context(open(program.stderr, "wb"))
        try:
            return subprocess.Popen(
                list(program.argv),
                env=dict(program.env),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent, signal.SIGKILL),
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise AgentFailed(f"cannot start {program.argv[0]}: {why}") from None


async def _watched(
    child: subprocess.Popen[bytes], program: Program, deadline: float, limit: float
) -> str | None:
    """Until it has ended by itself, or why it is to be ended."""
    pause = 0.005
    while not _has_ended(child):
        if time.monotonic() >= deadline:
            return f"took more than {limit:g} s"
        if _printed(program) > MAX_OUTPUT:
            return f"printed more than {MAX_OUTPUT >> 20} MiB"
        await asyncio.sleep(pause)
        pause = min(pause * 2, _POLL_INTERVAL)
    return None


async def _asked_to_end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and some time for it."""
    _signal_group(child.pid, signal.SIGTERM)
    left = _GRACE
    while not _has_ended(child) and left > 0:
        await asyncio.sleep(_POLL_INTERVAL)
        left -= _POLL_INTERVAL


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Whether it is dead; where there is `waitid`, it is not reaped by that."""
    if not hasattr(os, "waitid"):
        return child.poll() is not None
    try:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, child.pid, flags) is not None
    except ChildProcessError:
        return True


def _printed(program: Program) -> int:
    return sum(os.stat(path).st_size for path in (program.stdout, program.stderr))


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _end_strays(mark: str) -> None:
    """SIGKILL whatever has this mark in its environment.

    Again until nothing is found, since one may have started another meanwhile.
    """
    for _ in range(_SWEEPS):
        if not [name for name in _processes() if _end_marked(int(name), mark.encode())]:
            return


def _processes() -> list[str]:
    if not hasattr(signal, "pidfd_send_signal"):
        return []
    try:
        return [name for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def _end_marked(pid: int, mark: bytes) -> bool:
    # Held by a descriptor, so that its number cannot become another one's in between.
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if mark not in file.read().split(b"\0"):
                return False
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(process)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
