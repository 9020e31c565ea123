"""What tells conversations apart before anything is rendered: equal however an API writes them."""

from __future__ import annotations

import sys
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from any_agent.protocol import conversation_key as conversation
from any_agent.protocol.conversation_key import TASK_PREFIX, rank_of_answer, rank_tag, task_of
from any_agent.protocol.rl import StartSession

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
def test_one_conversation_has_the_same_key_in_every_api(body: dict[str, Any]) -> None:
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
def test_another_conversation_has_another_key(body: dict[str, Any]) -> None:
    assert task_of(body) != task_of(CHAT)


LONG = "\n".join(f"Line {k} of a long text." for k in range(20_000))


def test_one_long_conversation_has_the_same_key_in_every_api() -> None:
    system, asked = f"{SYSTEM}\n{LONG}", f"{LONG}\n{ASKED}"
    user = {"role": "user", "content": asked}
    spread = LONG.replace("\n", " \r\n\n", 1000)
    same = [
        {"messages": [{"role": "system", "content": system}, user]},
        {"messages": [*({"role": "system", "content": text} for text in (SYSTEM, LONG)), user]},
        {"messages": [{"role": "system", "content": f"\n{SYSTEM}\n\n{spread}\n"}, user]},
        {"instructions": system, "input": asked},
        {"instructions": system, "input": [{**user, "content": [{"text": f"{asked}\n"}]}]},
        {"system": [{"text": text} for text in (BILLING, SYSTEM, LONG)], "messages": [user]},
        {"system": [{"text": text} for text in (f"{BILLING} 12", system)], "messages": [user]},
    ]
    assert len({task_of(body) for body in same}) == 1
    other = {"role": "user", "content": f"{LONG}\nSay a word."}
    assert task_of({"system": system, "messages": [other]}) != task_of(same[0])


@pytest.mark.parametrize("line", ["ab\n", "\n", " \n", "a" * 500 + "\n", f"{BILLING}\n"])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_long_text_is_not_looked_at_line_by_line(
    line: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would stop everybody else in the process."""
    monkeypatch.setattr(conversation, "HEAD", 2000)

    def steps(length: int) -> int:
        text = line * (length // len(line))
        body = {"system": [{"text": text}] * parts, "messages": [{"role": "user", "content": text}]}
        taken = 0

        def count(*_: object) -> None:
            nonlocal taken
            taken += 1

        sys.setprofile(count)
        try:
            task_of(body)
        finally:
            sys.setprofile(None)
        return taken

    # What the collector of garbage ends meanwhile is counted, too.
    assert steps(80_000) < 1.1 * steps(20_000)


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3)
FIELDS = st.sampled_from(["messages", "input", "system", "instructions", "role", "content", "text"])
OBJECTS = st.dictionaries(FIELDS, SCALARS | st.lists(SCALARS, max_size=2), max_size=3)
BODIES = SCALARS | st.dictionaries(FIELDS, SCALARS | st.lists(OBJECTS | SCALARS, max_size=3))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(BODIES)
def test_any_json_body_gives_a_task_that_may_be_opened(body: Any) -> None:
    task = task_of(body)
    assert task.startswith(TASK_PREFIX) and task == task_of(orjson.loads(orjson.dumps(body)))
    assert StartSession.model_validate({"task_id": task}).task_id == task


def test_the_id_of_an_answer_names_its_rank() -> None:
    for rank in (0, 1, 255, 4095):
        for prefix, choice in (("resp_", ""), ("chatcmpl-", ".1"), ("msg_", ""), ("cmpl-", "")):
            assert rank_of_answer(f"{prefix}{rank_tag(rank)}{'0' * 28}{choice}") == rank
    for id in (
        None,
        7,
        "",
        "resp_",
        "resp_12",
        "0001aaaa",
        "ses-0-0001",
        "resp_zzzz0",
        "resp_0001aa\n",
    ):
        assert rank_of_answer(id) is None
