"""Calls of a grader, `module.function`, which takes a session as a dict and returns its reward.

A grader runs in its own process, which it may crash or block. Only plain values leave the process.
``python -m any_agent.rewards.grader [--check] module.function`` is such a process: it reads the
session as JSON from standard input and prints the reward as its last line.
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
"""True and the reward, or False and the error's text."""

_MAX_MESSAGE = 160  # characters of a grader's error that are kept


def find(name: str) -> Outcome:
    """Look up the function of this name."""
    try:
        return callable(_function(name)), f"{name} cannot be called"
    except BaseException as error:  # SystemExit, too: a module may exit
        return False, _format_error(error)


def grade(name: str, session: dict[str, Any]) -> Outcome:
    """Call the grader on a session.

    Its reward is a number, or several by name; or those of its calls, several by name each.
    """
    try:
        returned = _function(name)(session)
        if inspect.iscoroutine(returned):
            returned = asyncio.run(returned)
        return True, _plain(returned)
    except BaseException as error:
        return False, _format_error(error)


def _function(name: str) -> Any:
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


def _plain(returned: Any) -> Any:
    if isinstance(returned, Mapping):
        return {str(name): _plain(value) for name, value in returned.items()}
    return plain_number(returned)


def plain_number(returned: Any) -> float:
    """Return a finite number of Python, numpy or torch; TypeError or ValueError for any other
    value."""
    if isinstance(returned, bool | str | bytes) or returned is None:
        raise TypeError(f"it returned {short(repr(returned))}, not a number")
    number = float(returned)
    if not math.isfinite(number):
        raise ValueError(f"it returned {number}")
    return number


def _format_error(error: BaseException) -> str:
    return short(f"{type(error).__name__}: {error}")


def short(text: str) -> str:
    """Return the text in one line of limited length."""
    text = " ".join(text.split())
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 3] + "..."


def main(argv: Sequence[str]) -> int:
    """Return the exit code: 0 if there is a reward or, with ``--check``, such a function."""
    if argv[0] == "--check":
        worked, result = find(argv[1])
    else:
        worked, result = grade(argv[0], json.load(sys.stdin))
    if not worked:
        print(result, file=sys.stderr)
        return 1
    print(f"\n{json.dumps(result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
