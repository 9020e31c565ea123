"""Models on a hub: the launcher downloads them once, before its parts start, and shows progress."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from any_agent.config import SECRET_VARIABLES
from any_agent.errors import StartupError
from any_agent.runtime.environment import environment_without
from any_agent.runtime.signals import die_with_parent

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FETCH = "any_agent.launcher.fetch_model"
_STALL = 60.0
"""Seconds without a byte that end a download."""
_NOTICE_INTERVAL = 5.0  # seconds between two lines about a download
_POLL = 0.1
_OFFLINE = "HF_HUB_OFFLINE"


def on_hub(model: str) -> bool:
    """Return whether a model is named by its hub id, not by a local folder."""
    return bool(_NAME.fullmatch(model)) and not (Path(model) / "config.json").is_file()


def parts_variables() -> Mapping[str, str]:
    """Return the variables with which parts load what the launcher downloaded, and fetch nothing;
    a value that the user has set stays."""
    return {} if _OFFLINE in os.environ else {_OFFLINE: "1"}


def bring_model(
    name: str,
    say: Callable[[str], None],
    *,
    check: Callable[[], object] = lambda: None,
    stall: float = _STALL,
) -> None:
    """Download a hub's model into the cache, unless it is there; print progress.

    There is no limit while bytes arrive. ``check`` is called all the time, and may end the wait by
    an exception. Raises StartupError with what to do.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", _FETCH, name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment_without(SECRET_VARIABLES),
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGKILL),
    )
    try:
        _follow(name, child, say, check, stall)
    finally:
        child.kill()
        child.wait()


def _follow(
    name: str,
    child: subprocess.Popen[bytes],
    say: Callable[[str], None],
    check: Callable[[], object],
    stall: float,
) -> None:
    assert child.stdout is not None
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
    progress = _Progress(name, say)
    while True:
        check()
        try:
            line = lines.get(timeout=_POLL)
        except queue.Empty:
            line = {}
        if line is None:
            code = child.wait()
            raise StartupError(f"the download of {name} ended with code {code}; start it again")
        if "error" in line:
            raise StartupError(f"{line['error']}")
        if "commit" in line:
            progress.end(line["commit"])
            return
        silent = progress.update(line)
        if silent > stall:
            raise StartupError(
                f"the download of {name} stalled: no byte for {silent:.0f} s, "
                f"{_size(progress.done)} so far; start it again, it continues from there, or set "
                "HF_ENDPOINT to a mirror"
            )


def _read(out: IO[bytes], lines: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for text in out:
        # A library may print, too.
        if text.startswith(b"{"):
            lines.put(json.loads(text))
    lines.put(None)


class _Progress:
    """Lines about a download: bytes, their sum, and the rate since the last line."""

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self.done = self._total = 0
        self._changed_at = self._told_at = time.monotonic()
        self._told_done = 0
        self._began: float | None = None

    def update(self, line: Mapping[str, Any]) -> float:
        """Take a line of the child's; return the seconds since the last byte."""
        now = time.monotonic()
        if line.get("done", 0) > self.done:
            if self._began is None:
                # What an earlier download left is not of this one's rate.
                self._began = self._told_at = now
                self._told_done = line["done"]
                self._say(f"model     {self._name} is downloaded from its hub")
            self.done, self._changed_at = line["done"], now
        self._total = line.get("total", self._total)
        silent = now - self._changed_at
        if now - self._told_at >= _NOTICE_INTERVAL:
            self._say(f"model     {self._name}: {self._state(now, silent)}")
            self._told_at, self._told_done = now, self.done
        return silent

    def _state(self, now: float, silent: float) -> str:
        if self._began is None:
            return f"no byte of its hub so far ({silent:.0f} s)"
        rate = (self.done - self._told_done) / (now - self._told_at)
        still = f"{_size(rate)}/s" if rate else f"nothing for {silent:.0f} s"
        of = f" of {_size(self._total)}" if self._total else ""
        return f"{_size(self.done)}{of}, {still}"

    def end(self, commit: str) -> None:
        what = f"{_size(self.done)} downloaded" if self._began is not None else "in the cache"
        self._say(f"model     {self._name}: {what}, commit {commit[:12]}")


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.2f} GB"
