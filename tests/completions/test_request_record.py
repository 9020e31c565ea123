"""What an interaction keeps of its request."""

from __future__ import annotations

from typing import Any

from any_agent.completions.call_types import recorded_of
from tests.support.completions.params import OTHER, TOOL, parse


def test_a_record_has_the_settings_that_the_request_chose() -> None:
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"user": "u", "store": True}, {"user": "u", "store": True}),
        ({"length_penalty": 1}, {"length_penalty": 1}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (switch, switch),
        ({"tools": [TOOL], "parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"tools": [TOOL], "parallel_tool_calls": True}, {}),
        ({"tools": [TOOL], "tool_choice": "required"}, {"tool_choice": "f"}),
        ({"tools": [TOOL, OTHER], "tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tools": [TOOL], "tool_choice": "auto", "temperature": 0.5}, {}),
    ]
    for asked, recorded in cases:
        call = parse(**asked)
        before = dict(call.recorded)
        assert recorded_of(call) == recorded
        assert call.recorded == before
