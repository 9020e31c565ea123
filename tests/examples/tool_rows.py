"""What training was given of an agent that adds with a tool: right from the first call on."""

from __future__ import annotations

import re

from tests.examples.lab import Ran


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
        a, b = re.findall(r"What is (\d) \+ (\d)\?", row["prompt"])[-1]
        numbers = re.findall(r"-?\d+", row["completion"].removesuffix("<|im_end|>"))
        assert row["reward"] == float(numbers[-1:] == [str(int(a) + int(b))]), row
    # What a call of the tool is worth is what came of it.
    assert {row["reward"] for row in called} <= {0.0, 1.0}
