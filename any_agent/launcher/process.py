"""One child process: started in a group of its own, logged to a file, ended for certain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from any_agent.config import ENV_PREFIX
from any_agent.errors import StartupError

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """In the child: end when the launcher is killed, so that nothing is left behind."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Process:
    """A named child. ``python -m module`` arguments; output goes to ``log``.

    It inherits ``lock``, a locked file, so that the lock is held until the last child is gone.
    ``secrets`` are variables for its environment; other settings of ours do not reach it that way.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        lock: int | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._lock = lock
        self._secrets = secrets or {}
        self._arguments = [sys.executable, "-m", *arguments]
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as out:
            self._popen = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_environment() | dict(self._secrets),
                pass_fds=() if self._lock is None else (self._lock,),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._popen.poll() if self._popen is not None else None

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def wait_ready(self, ready: Callable[[], bool], *, timeout: float) -> None:
        """Wait until it is ready; StartupError with the end of its log if it dies or takes long."""
        deadline = time.monotonic() + timeout
        delay = 0.05
        while not ready():
            if not self.running:
                raise StartupError(f"{self.name} could not start:\n{self.last_lines()}")
            if time.monotonic() > deadline:
                raise StartupError(
                    f"{self.name} was not ready after {timeout:g} s:\n{self.last_lines()}"
                )
            time.sleep(delay)
            delay = min(delay * 1.3, 0.5)

    def stop(self, *, grace: float) -> None:
        """SIGTERM to the group, SIGKILL after ``grace`` seconds; returns when it is gone."""
        if self._popen is None or self._popen.returncode is not None:
            # Reaped before: the number may be another process's by now.
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(grace)
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def ask_to_stop(self) -> None:
        if self.running:
            self._signal(signal.SIGTERM)

    def last_lines(self, count: int = 15) -> str:
        """The end of its log, indented."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 65_536))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        shown = lines[-count:] or ["(its log is empty)"]
        return "\n".join(f"    {line}" for line in shown) + f"\n  log: {self.log}"

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def _environment() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
