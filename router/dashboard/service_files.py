"""A run's settings, keys and logs, as the files in its folder have them; no secret is in any."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from any_agent.auth.key_store import read_keys
from any_agent.errors import AnyAgentError, NotFound
from any_agent.rundir.layout import RunDir

_NAME = re.compile(r"[a-z][a-z0-9-]{0,63}")
MAX_BYTES = 128 << 10
"""Bytes of the end of a log that are shown."""
_MAX_SETTINGS = 256 << 10


@dataclass(frozen=True, slots=True)
class KeyRow:
    id: str
    scope: str
    tenant: str
    state: str
    created_at: float
    created_by: str
    expires_at: float | None


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of one log."""

    name: str
    text: str
    whole: bool
    """False if it has earlier lines."""


def settings_of(run: RunDir) -> str:
    """Return the settings of the service's start, which are saved without secrets."""
    try:
        with open(run.resolved, encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_SETTINGS)
    except OSError as error:
        return f"{run.resolved.name} cannot be read: {error.strerror}"


def keys_of(run: RunDir) -> tuple[list[KeyRow], str]:
    """Return the stored keys, the newest first, without their hashes, and why they cannot be read;
    "" if they can."""
    now = time.time()
    try:
        found = read_keys(run.keys).keys
    except AnyAgentError as error:
        return [], error.message
    rows = [
        KeyRow(
            *(key.id, key.scope, key.tenant or "", key.state(now)),
            *(key.created_at, key.created_by, key.expires_at),
        )
        for key in found
    ]
    return sorted(rows, key=lambda row: -row.created_at), ""


def logs_of(run: RunDir) -> Sequence[str]:
    """Return the names of the parts that have a log here."""
    try:
        names = [path.stem for path in run.logs.iterdir() if path.suffix == ".log"]
    except OSError:
        return []
    return sorted(name for name in names if _NAME.fullmatch(name))


def log_of(run: RunDir, name: str) -> LogTail:
    """Return the end of a part's log, in whole lines; NotFound for a part without one."""
    path = run.logs / f"{name}.log"
    if not _NAME.fullmatch(name):
        raise NotFound("there is no such log")
    try:
        with open(path, "rb", opener=_no_link) as file:
            start = max(0, os.fstat(file.fileno()).st_size - MAX_BYTES)
            file.seek(start)
            content = file.read(MAX_BYTES)
    except OSError:
        raise NotFound(f"there is no log of {name} on this machine") from None
    if start:
        # One line may be longer than all that is shown.
        content = content.partition(b"\n")[2] or content
    return LogTail(name, content.decode(errors="replace"), whole=start == 0)


def _no_link(path: str | Path, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
