"""What training was given of agents outside, as the journal has it, and whether it is right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import run_cli


def talks(experiment: str, folder: Path) -> list[dict[str, Any]]:
    """Each conversation that was trained on: its `messages` and its `reward`."""
    wanted = ("--experiment", experiment, "--trial", "first", "--state", "trained")
    done = run_cli("export", *wanted, "--style", "messages", f"root={folder}/runs", cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_talks(
    found: list[dict[str, Any]], *, reward: Callable[[bool, bool], float], least: int
) -> None:
    """Tools have added rightly, and every reward is what ``reward`` says of an answer that is right
    or not, and was worked out by a tool or not."""
    assert len(found) >= least
    used = 0
    for talk in found:
        question, *_, answer = talk["messages"]
        a, b = map(int, re.findall(r"What is (\d) \+ (\d)\?", question["content"])[-1])
        results = [message for message in talk["messages"] if message["role"] == "tool"]
        for result, call in zip(results, _calls(talk), strict=True):
            assert result["content"] == _added(call["function"]["arguments"])
        used += bool(results)
        right = (answer["content"] or "").strip() == str(a + b)
        assert talk["reward"] == pytest.approx(reward(right, bool(results))), talk
    assert used, "nobody has used a tool"


def _calls(talk: dict[str, Any]) -> list[dict[str, Any]]:
    return [call for message in talk["messages"] for call in message.get("tool_calls") or ()]


def _added(arguments: str) -> str:
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) + int(given["b"]))
    except (ValueError, KeyError, TypeError):
        return "error: a and b must be whole numbers"
