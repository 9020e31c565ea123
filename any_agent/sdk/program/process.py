"""`run_program`: one program that `any-agent run` starts, with its output in files.

No process of it remains at its end. It runs in its own POSIX session, so that it and its children
are one process group. A process that leaves the group (a daemon, a detached child of Node's) is
found by the mark in its environment on Linux, and is killed, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from any_agent.errors import AgentFailed
from any_agent.runtime.atomic_files import owner_only
from any_agent.runtime.signals import die_with_parent

_POLL_INTERVAL = 0.05
TERM_TIMEOUT = 3.0  # seconds from SIGTERM to SIGKILL
_REAP_TIMEOUT = 5.0
_MAX_SWEEPS = 10
_ECHO_BYTES = 65_536
MAX_OUTPUT = 2**30  # bytes of output after which a program is ended, as it could fill the disk


@dataclass(frozen=True, slots=True)
class Program:
    """A command and its files. ``mark`` is a ``NAME=value`` in its environment, unique to the
    run."""

    argv: Sequence[str]
    env: Mapping[str, str]
    mark: str
    stdout: Path
    stderr: Path
    stdin: Path = Path(os.devnull)


@dataclass(frozen=True, slots=True)
class ProgramExit:
    """The end of a program: by itself with ``code`` (negative: a signal), or by its runner, for the
    reason ``cut_off``."""

    code: int | None
    seconds: float
    cut_off: str | None = None

    @property
    def success(self) -> bool:
        return self.code == 0 and self.cut_off is None

    def __str__(self) -> str:
        if self.cut_off is not None:
            return self.cut_off
        assert self.code is not None
        if self.code >= 0:
            return f"ended with exit code {self.code}"
        return f"was killed by {_signal_name(-self.code)}"


async def run_program(program: Program, *, limit: float) -> ProgramExit:
    """Run a program to its end, or for ``limit`` seconds; AgentFailed if it cannot be started.

    On return, and also after a cancellation, none of its processes is running any more.
    """
    began = time.monotonic()
    child = _start(program)
    cut_off = None
    try:
        cut_off = await _wait_for_end(child, program, began + limit, limit)
        if cut_off is not None:
            await _terminate(child)
    except asyncio.CancelledError:
        await _terminate(child)
        raise
    finally:
        # Before it is reaped, because another group may get its number afterwards.
        _signal_group(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_REAP_TIMEOUT)
        _kill_strays(program.mark)
    code = child.returncode if cut_off is None else None
    return ProgramExit(code, time.monotonic() - began, cut_off)


def _start(program: Program) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    with contextlib.ExitStack() as files:
        stdin = files.enter_context(open(program.stdin, "rb"))
        stdout = files.enter_context(open(program.stdout, "wb", opener=owner_only))
        stderr = files.enter_context(open(program.stderr, "wb", opener=owner_only))
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


async def _wait_for_end(
    child: subprocess.Popen[bytes], program: Program, deadline: float, limit: float
) -> str | None:
    """Wait until the program has ended by itself, or return the reason to end it."""
    pause = 0.005
    while not _has_ended(child):
        if time.monotonic() >= deadline:
            return f"took more than {limit:g} s"
        if _output_size(program) > MAX_OUTPUT:
            return f"printed more than {MAX_OUTPUT >> 20} MiB"
        await asyncio.sleep(pause)
        pause = min(pause * 2, _POLL_INTERVAL)
    return None


async def _terminate(child: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, and wait a bounded time for the end."""
    _signal_group(child.pid, signal.SIGTERM)
    left = TERM_TIMEOUT
    while not _has_ended(child) and left > 0:
        await asyncio.sleep(_POLL_INTERVAL)
        left -= _POLL_INTERVAL


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Return True if the process is dead; it stays unreaped where the system has `waitid`."""
    if not hasattr(os, "waitid"):
        return child.poll() is not None
    try:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, child.pid, flags) is not None
    except ChildProcessError:
        return True


def _output_size(program: Program) -> int:
    return sum(os.stat(path).st_size for path in (program.stdout, program.stderr))


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _kill_strays(mark: str) -> None:
    """Send SIGKILL to all processes with this mark in their environment, until none is found: one
    may start another meanwhile."""
    for _ in range(_MAX_SWEEPS):
        if not [name for name in _processes() if _kill_if_marked(int(name), mark.encode())]:
            return


def _processes() -> list[str]:
    if not hasattr(signal, "pidfd_send_signal"):
        return []
    try:
        return [name for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def _kill_if_marked(pid: int, mark: bytes) -> bool:
    # By a descriptor, because another process may get the number in between.
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


class OutputEcho:
    """Copies a growing file to a descriptor in its own thread, as the reader may be slow."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._to = descriptor
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="echo", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Announce that the file is complete; return at once."""
        self._ended.set()

    def finish(self) -> None:
        """Wait until the whole file is copied."""
        self._ended.set()
        self._thread.join()

    def _copy(self) -> None:
        position = 0
        while True:
            last = self._ended.wait(_POLL_INTERVAL)
            try:
                position = self._copy_from(position)
            except OSError:
                # The descriptor's reader has gone; the output is still in the file.
                return
            if last:
                return

    def _copy_from(self, position: int) -> int:
        if not self._path.exists():
            return position
        with open(self._path, "rb") as file:
            file.seek(position)
            while part := file.read(_ECHO_BYTES):
                position += len(part)
                while part:
                    part = part[os.write(self._to, part) :]
        return position
