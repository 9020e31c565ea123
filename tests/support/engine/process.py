"""A real engine process that a test kills and starts again on the same port."""

from __future__ import annotations

import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from any_agent.runtime.ports import reserve
from tests.support.real_parts import await_url, process


class EngineProcess:
    """``python -m any_agent.engine.embedded`` on a port of its own; ended with the context."""

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        listener = self._stack.enter_context(reserve("127.0.0.1", 0))
        self._port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._log = folder / "engine.log"
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def start(self, model: Path, *options: str) -> None:
        """Returns once it serves."""
        arguments = ["any_agent.engine.embedded", "--model-path", str(model)]
        arguments += ["--port", str(self._port), "--incremental-streaming-output", *options]
        self._child = self._stack.enter_context(process(self._log, *arguments))
        await_url(f"{self.url}/health", self._child, self._log)

    def kill(self) -> None:
        """kill -9."""
        assert self._child is not None
        self._child.kill()
        self._child.wait()

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP hangs it, with its sockets open; SIGCONT lets it go on."""
        assert self._child is not None
        self._child.send_signal(number)
