"""A child process in its own group, with a log file and a guaranteed end; the check of its URL."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from any_agent.config import ENV_PREFIX
from any_agent.runtime.atomic_files import make_folder, owner_only
from any_agent.runtime.logs import Redactor
from any_agent.runtime.signals import die_with_parent

_PYTHON_VARIABLES = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"),
)
"""Variables that tell this interpreter where its modules lie; another environment's must not
inherit them."""
_USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
PART = 1 << 20  # bytes of a log that are in memory at once


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a process, and the signals that end it."""

    arguments: Sequence[str]
    """The name of a module, and its arguments."""
    launch: Sequence[str] = ("-m",)
    """The interpreter's arguments that run a module by its name."""
    python: str | None = None
    """Another environment's interpreter; None: this one."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables added to its environment."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Secret variables added to its environment, which has none of our other settings."""
    listener: int | None = None
    """The number of a socket that it inherits."""
    quick: int = signal.SIGTERM
    """The signal that ends it at once; a process that drains at SIGTERM needs another one."""
    drain: int = signal.SIGTERM
    """The signal at which it finishes its work and ends."""
    before: Sequence[str] = ()
    """A program that runs the command on another machine, such as srun. It passes signals on, and
    ends the command if it is killed itself."""

    @property
    def orphaned(self) -> int:
        """The signal that it gets when the launcher is killed.

        A process may handle any other signal late, or never while it is stopped, and whatever is
        acknowledged is on disk. On another machine ``quick`` also ends what the command started.
        """
        return self.quick if self.before else signal.SIGKILL


class SupervisedProcess:
    """A named child that writes its output to ``log``.

    It inherits ``lock``, a locked file, so that the lock is held until the last child is gone.
    """

    def __init__(self, name: str, command: Command, log: Path, *, lock: int | None = None) -> None:
        self.name = name
        self.log = log
        self._command = command
        self._inherited = [fd for fd in (lock, command.listener) if fd is not None]
        self._popen: subprocess.Popen[bytes] | None = None
        self._masked = 0
        """The part of its log, in bytes, in which secrets are masked."""
        self._log_begins = 0
        """The size of its log when it was started, behind what earlier starts wrote."""

    def start(self) -> None:
        command = self._command
        make_folder(self.log.parent)
        parent = os.getpid()
        # Slurm sends a step's signals to all of its processes; children ignore the signals that
        # this process handles.
        handled = [number for number in _USER_SIGNALS if callable(signal.getsignal(number))]

        def prepare() -> None:
            for number in handled:
                signal.signal(number, signal.SIG_IGN)
            die_with_parent(parent, command.orphaned)

        python = command.python or sys.executable
        with open(self.log, "ab", opener=owner_only) as out:
            self._log_begins = out.tell()
            self._popen = subprocess.Popen(
                [*command.before, python, *command.launch, *command.arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                pass_fds=self._inherited,
                start_new_session=True,
                umask=0o077,  # for what libraries write
                preexec_fn=prepare,
            )

    @property
    def pid(self) -> int:
        assert self._popen is not None
        return self._popen.pid

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs. A dead child's descendants are killed."""
        if self._popen is None:
            return None
        if self._popen.returncode is None and self._exited():
            # Killed before it is reaped: after that, another group may get the number.
            self._signal(signal.SIGKILL)
        return self._popen.poll()

    @property
    def running(self) -> bool:
        return self._popen is not None and self.poll() is None

    def stop(self, *, grace: float) -> None:
        """End the group, by SIGKILL after ``grace`` seconds; return when it is gone."""
        if not self.running:
            return
        assert self._popen is not None
        self._signal(self._command.quick)
        deadline = time.monotonic() + grace
        while not self._exited() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._signal(signal.SIGKILL)
        self._popen.wait()

    def drain(self) -> None:
        """Signal it to finish its work and end."""
        if self.running:
            self._signal(self._command.drain)

    def terminate(self) -> None:
        """Signal it to end at once."""
        if self.running:
            self._signal(self._command.quick)

    def kill(self) -> None:
        """Send SIGKILL to the group without waiting for its end."""
        if self.running:
            self._signal(signal.SIGKILL)

    def last_lines(self, count: int = 15) -> str:
        """Return the end of what this start wrote to its log, indented, without keys."""
        try:
            with open(self.log, "rb") as file:
                file.seek(max(self._log_begins, file.seek(0, os.SEEK_END) - 65_536))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        shown = lines[-count:] or ["(it wrote nothing to its log)"]
        text = "\n".join(f"    {line}" for line in shown)
        return f"{Redactor().text(text)}\n  log: {self.log}"

    def mask(self, secret: str) -> None:
        """Overwrite a secret in what its log got since the last call: another's program may write
        it there with its settings."""
        sought = secret.encode()
        with open(self.log, "r+b", buffering=0) as file:
            log = file.fileno()
            while len(part := os.pread(log, PART, self._masked)) >= len(sought):
                at = part.find(sought)
                while at >= 0:
                    # In place, because the program appends to the same file.
                    os.pwrite(log, b"*" * len(sought), self._masked + at)
                    at = part.find(sought, at + len(sought))
                # Its beginning may be the end of this part.
                self._masked += len(part) - len(sought) + 1

    def _environment(self) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
        environment["PYTHONUNBUFFERED"] = "1"
        # A part that a library's native code ends leaves its stack in its log.
        environment.setdefault("PYTHONFAULTHANDLER", "1")
        if self._command.python is not None:
            for name in _PYTHON_VARIABLES:
                environment.pop(name, None)
            environment["PYTHONSAFEPATH"] = "1"
        return environment | dict(self._command.variables) | dict(self._command.secrets)

    def _exited(self) -> bool:
        """Return whether it is dead, without reaping it."""
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.pid, flags) is not None
        except ChildProcessError:
            return True

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._command.before:
                # The program passes the signal on. Its helper ends the command when the program
                # is dead: srun's helper does, and it is in srun's group.
                os.kill(self.pid, number)
            else:
                os.killpg(self.pid, number)


DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without an `http_proxy` of the environment: the parts are on this machine."""


def answers(url: str, *, within: float = 2.0) -> bool:
    """Return whether a GET is answered with 200 within so many seconds."""
    try:
        with DIRECT.open(url, timeout=within) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError):
        return False
