"""One child process: started in a group of its own, logged to a file, ended for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from any_agent.config import ENV_PREFIX
from any_agent.runtime.parent_death import die_with_parent

_OUR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
_USERS = (signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Command:
    """What a process runs."""

    arguments: list[str]
    """What follows `python -m`."""
    python: str | None = None
    """Another environment's interpreter; None: ours."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """For its environment."""
    orphaned: int | None = None
    """The signal that it gets when the launcher is killed; None: the one that ends it at once."""


class SupervisedProcess:
    """A named child. ``python -m module`` arguments; output goes to ``log``.

    ``python`` is another environment's interpreter: what ours is told about where modules lie is
    kept from it. ``variables`` are added to its environment.

    It inherits ``lock``, a locked file, so that the lock is held until the last child is gone, and
    ``listener``, a socket, under its number here. ``secrets`` are variables for its environment;
    other settings of ours do not reach it that way. ``quick`` is the signal that ends it at once,
    also when the launcher is killed: of those that drain at SIGTERM it is another one. ``before``
    is a program that runs this one somewhere, with what it is told, passes signals on, and leaves
    somebody who ends this one should it be killed itself, as srun does; of one that does not pass
    SIGTERM on, ``drain`` is what is sent instead. ``orphaned`` is what one gets
    when the launcher is killed that does not end at ``quick`` by itself.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        python: str | None = None,
        variables: Mapping[str, str] | None = None,
        lock: int | None = None,
        listener: int | None = None,
        secrets: Mapping[str, str] | None = None,
        quick: int = signal.SIGTERM,
        drain: int = signal.SIGTERM,
        before: Sequence[str] = (),
        orphaned: int | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self._inherited = [number for number in (lock, listener) if number is not None]
        self._secrets = secrets or {}
        self._quick = quick
        self._orphaned = quick if orphaned is None else orphaned
        self._drain = drain
        self._relayed = bool(before)
        self._arguments = [*before, python or sys.executable, "-m", *arguments]
        self._foreign = python is not None
        self._variables = variables or {}
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        parent, orphaned = os.getpid(), self._orphaned
        # Slurm sends a step's signals to all of its processes: what this one hears is for it alone.
        ours = [number for number in _USERS if callable(signal.getsignal(number))]

        def prepare() -> None:
            for number in ours:
                signal.signal(number, signal.SIG_IGN)
            die_with_parent(parent, orphaned)

        with open(self.log, "ab") as out:
            self._popen = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                pass_fds=self._inherited,
                start_new_session=True,
                preexec_fn=prepare,
            )

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs. Nothing that a dead child started lives on."""
        if self._popen is None:
            return None
        if self._popen.returncode is None and self._exited():
            # Before it is reaped: after that, the group's number may be another one's.
            self._signal(signal.SIGKILL)
        return self._popen.poll()

    @property
    def running(self) -> bool:
        return self._popen is not None and self.poll() is None

    def stop(self, *, grace: float) -> None:
        """End its group, by SIGKILL after ``grace`` seconds; returns when it is gone."""
        if not self.running:
            return
        assert self._popen is not None
        self._signal(self._quick)
        deadline = time.monotonic() + grace
        while not self._exited() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def ask_to_drain(self) -> None:
        """To end what it is doing, and itself."""
        if self.running:
            self._signal(self._drain)

    def ask_to_stop(self) -> None:
        """At once."""
        if self.running:
            self._signal(self._quick)

    def kill(self) -> None:
        """SIGKILL to the group; it is not waited for."""
        if self.running:
            self._signal(signal.SIGKILL)

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

    def _environment(self) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
        environment["PYTHONUNBUFFERED"] = "1"
        if self._foreign:
            for name in _OUR_PYTHON:
                environment.pop(name, None)
            environment["PYTHONSAFEPATH"] = "1"
        return environment | dict(self._variables) | dict(self._secrets)

    def _exited(self) -> bool:
        """Whether it is dead; it is not reaped by that."""
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.pid, flags) is not None
        except ChildProcessError:
            return True

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._relayed:
                # It passes the signal on, and a helper of its own ends what it ran when it is
                # dead: srun's does, which is in its group.
                os.kill(self.pid, number)
            else:
                os.killpg(self.pid, number)
