"""What training was given of agents outside, as the journal has it, and whether it is right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e.serving import run_cli

_ERROR = "error: a and b must be whole numbers"


def talks(experiment: str, folder: Path) -> list[dict[str, Any]]:
    """Each conversation that was trained on: its `messages` and its `reward`."""
    wanted = ("--experiment", experiment, "--trial", "first", "--state", "trained")
    done = run_cli("export", *wanted, "--style", "messages", f"root={folder}/runs", cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_talks(
    found: list[dict[str, Any]],
    *,
    answer: Callable[[str], str | None],
    reward: Callable[[bool, bool], float],
) -> None:
    """Tools have added rightly, and every reward is what ``reward`` says of an answer that is right
    or not, and was worked out by a tool or not. ``answer``: what of the last words is taken for the
    answer."""
    used = 0
    for talk in found:
        question, *_, last = talk["messages"]
        a, b = map(int, re.findall(r"What is (\d) \+ (\d)\?", question["content"])[-1])
        results = [message for message in talk["messages"] if message["role"] == "tool"]
        for result, call in zip(results, _calls(talk), strict=True):
            assert result["content"] in _added(call["function"]["arguments"]), call
        used += bool(results)
        right = answer(last["content"] or "") == str(a + b)
        assert talk["reward"] == pytest.approx(reward(right, bool(results))), talk
    assert used, "nobody has used a tool"


def _calls(talk: dict[str, Any]) -> list[dict[str, Any]]:
    return [call for message in talk["messages"] for call in message.get("tool_calls") or ()]


def _added(arguments: str) -> tuple[str, ...]:
    """What the tool may say; agents differ in whether the text of a number is a number."""
    try:
        given = json.loads(arguments)
        sum = str(int(given["a"]) + int(given["b"]))
    except (ValueError, KeyError, TypeError):
        return (_ERROR,)
    numbers = type(given["a"]) is type(given["b"]) is int
    return (sum,) if numbers else (sum, _ERROR)
