"""Whether the nodes of a job see one and the same folder."""

from __future__ import annotations

import secrets
import time

from any_agent.errors import ConfigError
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import write_atomic

_TIMEOUT = 60.0
"""Seconds; so long a network file system may show a folder as it was."""
_POLL_INTERVAL = 0.5


def mark(run: RunDir) -> str:
    """Leave something in the run's folder that only its other readers can know."""
    token = secrets.token_hex(16)
    write_atomic(run.shared, f"{token}\n")
    return token


def require_shared(run: RunDir, token: str, node: str, *, patience: float = _TIMEOUT) -> None:
    """ConfigError if this node's folder of that name is not the one in which the token was left."""
    deadline = time.monotonic() + patience
    while True:
        try:
            found = run.shared.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            found = None
        if found == token:
            return
        if time.monotonic() >= deadline:
            what = "is not there" if found is None else "is another one"
            raise ConfigError(
                f"{run.path} is not shared by the job's nodes: on {node} it {what}; set root to a "
                "folder on a file system that all of them see"
            )
        time.sleep(_POLL_INTERVAL)
