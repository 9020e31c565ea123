"""What training was given of an agent that adds with a tool: right from the first call on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.support.examples import Ran, asked, number, read

_WORDS = r"((?:(?!<\|im_end\|>).)*)"
"""Of one message."""
_CARRIED_OUT = re.compile(
    rf"<\|im_start\|>assistant\n{_WORDS}<\|im_end\|>\s*<\|im_start\|>user\s*{_WORDS}<\|im_end\|>",
    re.S,
)
"""An answer and what came after it, as the model is shown them."""
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
_RESULT = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.S)
_DOES = {"add": int.__add__, "multiply": int.__mul__}


def check_rows(run: Ran, *, tool: str) -> None:
    """Both steps were made, of calls of ``tool`` and of answers that are rewarded rightly."""
    assert [step["step"] for step in run.steps] == [1, 2]
    # Groups whose runs all score the same teach nothing, and are in no step.
    assert all(0 < reward < 1 for reward in run.rewards), run.rewards
    # It may also call a tool that is not there, and what is no call may look like one.
    called = [row for row in run.rows if "<tool_call>" in row["completion"]]
    answered = [row for row in run.rows if row not in called]
    assert any(f'{{"name": "{tool}"' in row["completion"] for row in called), "no call of the tool"
    assert any("<tool_response>" in row["prompt"] for row in answered), "no result of the tool"
    for row in answered:
        assert row["reward"] == float(number(read(row)) == str(sum(asked(row)))), row
    # What a call of the tool is worth is what came of it.
    assert {row["reward"] for row in called} <= {0.0, 1.0}


def check_tools(run: Ran) -> None:
    """Tools were used, and what each is shown to have answered is right."""
    used = [one for row in run.rows for one in _used(row["prompt"])]
    assert used, "nobody has used a tool"
    for name, a, b, result in used:
        assert _DOES[name](a, b) == result, (name, a, b, result)


def _used(prompt: str) -> Iterator[tuple[str, int, int, int]]:
    """Each call that a tool has taken: its name, its numbers, the result."""
    for said, heard in _CARRIED_OUT.findall(prompt):
        calls, results = _CALL.findall(said), _RESULT.findall(heard)
        if len(calls) != len(results):
            # Not all that looked like a call was one.
            continue
        for call, result in zip(calls, results, strict=True):
            name, a, b = _numbers(call)
            if name in _DOES and result.isdigit():
                yield name, a, b, int(result)


def _numbers(call: str) -> tuple[str, int, int]:
    """What is no such call has no name: the model writes what it likes."""
    try:
        made: Any = json.loads(call)
        return str(made["name"]), int(made["arguments"]["a"]), int(made["arguments"]["b"])
    except (ValueError, KeyError, TypeError):
        return "", 0, 0
