"""What an interaction keeps of its request."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.completions.call_types import recorded_of
from tests.support.completions.params import OTHER, TOOL, parse


@pytest.mark.parametrize(
    ("asked", "recorded"),
    [
        ({}, {}),
        ({"user": "u", "store": True}, {"user": "u", "store": True}),
        ({"length_penalty": 1}, {"length_penalty": 1}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ({"tools": [TOOL], "parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"tools": [TOOL], "parallel_tool_calls": True}, {}),
        ({"tools": [TOOL], "tool_choice": "required"}, {"tool_choice": "f"}),
        ({"tools": [TOOL, OTHER], "tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tools": [TOOL], "tool_choice": "auto", "temperature": 0.5}, {}),
    ],
    ids=str,
)
def test_what_is_recorded(asked: dict[str, Any], recorded: dict[str, Any]) -> None:
    call = parse(**asked)
    before = dict(call.recorded)
    assert recorded_of(call) == recorded
    assert call.recorded == before
