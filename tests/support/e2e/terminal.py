"""A command on a terminal of its own: seen, typed at, and left as it leaves it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def _take_terminal() -> None:
    """Ctrl-C reaches who has it for a controlling terminal, and does not ignore it: a shell
    starts background jobs, perhaps these tests, with SIGINT ignored."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The far end of a pseudo-terminal, and the process on it."""

    def __init__(self, arguments: list[str], *, cwd: Path, env: dict[str, str]) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self.settings = termios.tcgetattr(inner)
        self._inner = inner
        self.process = subprocess.Popen(
            arguments,
            cwd=cwd,
            env=env | {"TERM": "xterm-256color"},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        self._seen = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def raw(self) -> str:
        """Everything that it printed."""
        return bytes(self._seen).decode(errors="replace")

    @property
    def text(self) -> str:
        """The same without control sequences."""
        return _CONTROL.sub("", self.raw)

    def until(self, what: str, timeout: float) -> None:
        """Wait until it has printed that."""
        deadline = time.monotonic() + timeout
        while what not in self.text:
            assert self.process.poll() is None, self.text[-4000:]
            assert time.monotonic() < deadline, self.text[-4000:]
            time.sleep(0.05)

    def press_ctrl_c(self) -> None:
        os.write(self._fd, b"\x03")

    def end(self, timeout: float) -> int:
        """Its exit code, and all of its output is there."""
        code = self.process.wait(timeout)
        self._settle()
        return code

    def settings_now(self) -> list[object]:
        return termios.tcgetattr(self._inner)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
            self.process.kill()
            self.process.wait()
        os.close(self._inner)
        self._reader.join(60)
        os.close(self._fd)

    def _settle(self) -> None:
        """What was written before now comes out before a mark that is written now."""
        mark = b"--all-was-read--"
        os.write(self._inner, mark)
        deadline = time.monotonic() + 60
        while mark not in self._seen and time.monotonic() < deadline:
            time.sleep(0.01)
        del self._seen[self._seen.index(mark) :]

    def _read(self) -> None:
        while True:
            try:
                some = os.read(self._fd, 65_536)
            except OSError:
                return
            if not some:
                return
            self._seen += some


@contextlib.contextmanager
def terminal(arguments: list[str], *, cwd: Path, env: dict[str, str]) -> Iterator[Terminal]:
    """Run the command; it is ended with the context."""
    opened = Terminal(arguments, cwd=cwd, env=env)
    try:
        yield opened
    finally:
        opened.close()
