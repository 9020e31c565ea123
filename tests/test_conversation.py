"""What tells conversations apart before anything is rendered: equal however an API writes them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from any_agent.conversation import TASK_PREFIX, rank_of_response, rank_tag, task_of
from any_agent.protocol import StartSession

SYSTEM, ASKED = "Be brief.\n\nVery.", "Say a number."
USER = {"role": "user", "content": ASKED}
CHAT: dict[str, Any] = {"messages": [{"role": "system", "content": SYSTEM}, USER]}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=0001;"


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "developer", "content": SYSTEM}, USER]},
        {"messages": [*({"role": "system", "content": t} for t in ("Be brief.", " Very. ")), USER]},
        {"messages": [*CHAT["messages"], {"role": "assistant", "content": "7"}, USER]},
        {"messages": [CHAT["messages"][0], {"role": "user", "content": [{"text": ASKED}]}]},
        {"instructions": SYSTEM, "input": ASKED},
        {"instructions": SYSTEM, "input": [{"type": "message", **USER}]},
        {"input": [{"role": "system", "content": SYSTEM}, USER], "model": "any"},
        {"system": SYSTEM, "messages": [USER]},
        {"system": [{"type": "text", "text": SYSTEM}], "messages": [USER], "tools": []},
        {"system": [{"type": "text", "text": t} for t in (BILLING, SYSTEM)], "messages": [USER]},
    ],
)
def test_one_conversation_in_every_api(body: dict[str, Any]) -> None:
    assert task_of(body) == task_of(CHAT)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER]},
        {"messages": [CHAT["messages"][0], {"role": "user", "content": "Say a word."}]},
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
        {"instructions": ASKED, "input": SYSTEM},
        {},
    ],
)
def test_other_conversations(body: dict[str, Any]) -> None:
    assert task_of(body) != task_of(CHAT)


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
FIELDS = st.sampled_from(["messages", "input", "system", "instructions", "role", "content", "text"])
OBJECTS = st.dictionaries(FIELDS, SCALARS | st.lists(SCALARS, max_size=2), max_size=3)
BODIES = SCALARS | st.dictionaries(FIELDS, SCALARS | st.lists(OBJECTS | SCALARS, max_size=3))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(BODIES)
def test_any_json_has_a_task_that_may_be_opened(body: Any) -> None:
    task = task_of(body)
    assert task.startswith(TASK_PREFIX) and task == task_of(orjson.loads(orjson.dumps(body)))
    assert StartSession.model_validate({"task_id": task}).task_id == task


def test_a_response_names_its_rank() -> None:
    for rank in (0, 1, 255, 4095):
        assert rank_of_response(f"resp_{rank_tag(rank)}{'0' * 28}") == rank
    for id in (None, 7, "", "resp_", "resp_12", "chatcmpl-0001aaaa", "resp_zzzz0", "resp_0001aa\n"):
        assert rank_of_response(id) is None
