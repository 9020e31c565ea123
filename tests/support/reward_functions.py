"""Reward functions as people write them, and as they go wrong; importable by worker processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def documented(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    **data: Any,
) -> float:
    """Whether everything has come, and fits."""
    assert prompt_ids
    assert completion_ids
    assert data["answer"] in prompt
    return float(len(completions))


def digits(prompt: str, completions: str, *_: Any, **data: Any) -> float:
    """Whether the answer has a digit."""
    return float(any(c.isdigit() for c in completions))


def never(*_: Any, **data: Any) -> float:
    return 0.0


def pid() -> int:
    return os.getpid()


def by_name(result: str, answer: str) -> float:
    return float(result == answer)


def hangs() -> float:
    time.sleep(3600)
    return 1.0


def hangs_at(path: str) -> float:
    """Says there that it has begun."""
    Path(path).touch()
    return hangs()


def raises() -> float:
    raise ZeroDivisionError("nothing to divide by")


def leaves() -> float:
    sys.exit(2)


def dies() -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def dies_at_first(marker: str) -> float:
    if not Path(marker).exists():
        Path(marker).touch()
        dies()
    return 0.5


def words(*_: Any, **data: Any) -> str:
    return "very good"


def variable(name: str) -> str | None:
    return os.environ.get(name)


def first_environment() -> bytes:
    return Path("/proc/self/environ").read_bytes()
