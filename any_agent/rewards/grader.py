"""Calling a grader, `module.function`: it takes a session as a dict and returns its reward.

Runs in a process of its own, which it may crash or hang. Only plain values leave it, whatever the
grader returns or raises. ``python -m any_agent.rewards.grader [--check] module.function`` is such a
process: it reads the session as JSON from standard input and prints the reward as its last line.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Outcome: TypeAlias = tuple[bool, Any]
"""Whether it worked, and the reward or what went wrong."""

_MAX_MESSAGE = 160
"""Characters of what a grader failed with that are kept."""


def find(name: str) -> Outcome:
    """Whether there is such a function."""
    try:
        return callable(_function(name)), f"{name} cannot be called"
    except BaseException as error:  # also a module that exits
        return False, _said(error)


def grade(name: str, session: dict[str, Any]) -> Outcome:
    """What the grader makes of the session: a number, or several by name."""
    try:
        returned = _function(name)(session)
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        return True, _plain(returned)
    except BaseException as error:
        return False, _said(error)


def _function(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


def _plain(returned: Any) -> Any:
    if isinstance(returned, Mapping):
        return {str(name): _plain(value) for name, value in returned.items()}
    if isinstance(returned, bool | str | bytes) or returned is None:
        raise TypeError(f"it returned {short(repr(returned))}, not a number")
    number = float(returned)
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}")
    return number


def _said(error: BaseException) -> str:
    return short(f"{type(error).__name__}: {error}")


def short(text: str) -> str:
    """One line, cut off where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 3] + "..."


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 if there is a reward, or, with ``--check``, such a function."""
    if argv[0] == "--check":
        worked, said = find(argv[1])
    else:
        worked, said = grade(argv[0], json.load(sys.stdin))
    if not worked:
        print(said, file=sys.stderr)
        return 1
    print(f"\n{json.dumps(said)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
