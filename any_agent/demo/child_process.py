"""Modules of the demo that run as processes of their own, so that this one stays light."""

from __future__ import annotations

import os
import subprocess
import sys
from types import TracebackType
from typing import Self

from any_agent.errors import StartupError


class ChildProcess:
    """``python -m any_agent.demo.<module>``, ended with the context at the latest."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"any_agent.demo.{module}", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
            # Ctrl-C at the terminal is the demo's business.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def output(self, timeout: float) -> str:
        """What it printed; StartupError with the end of its complaint if it failed."""
        try:
            out, complaint = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise StartupError(f"any_agent.demo.{self._module} took over {timeout:g} s") from None
        if self._process.returncode != 0:
            raise StartupError(f"any_agent.demo.{self._module} failed:\n{complaint[-2000:]}")
        return out
