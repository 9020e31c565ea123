"""Names of messages count for the roles whose names a prompt shows."""

from __future__ import annotations

from typing import Any

import pytest

from any_agent.chat import chain_keys
from any_agent.chat.names import nameless_roles
from any_agent.types import Message, Tool
from tests.support.families import family

ALL = {"system", "user", "assistant", "tool"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "Sum 1 and 2"}
SAID: Message = {"role": "assistant", "content": "3"}


def plain(messages: list[Message], tools: list[Tool] | None) -> str:
    return " ".join(f"{m['role']} {m['content']}" for m in messages)


def of_the_assistant(messages: list[Message], tools: list[Tool] | None) -> str:
    names = [m.get("name", "") for m in messages if m["role"] == "assistant"]
    return " ".join([plain(messages, tools), *names])


def without_system(messages: list[Message], tools: list[Tool] | None) -> str:
    assert messages[0]["role"] != "system"
    return plain(messages, tools)


def refused(messages: list[Message], tools: list[Tool] | None) -> str:
    assert not any("name" in m for m in messages if m["role"] == "tool")
    return plain(messages, tools)


@pytest.mark.parametrize(
    ("render", "roles"),
    [
        (plain, ALL),
        (of_the_assistant, ALL - {"assistant"}),
        (without_system, ALL - {"system"}),
        (refused, ALL - {"tool"}),
        (lambda messages, tools: str(messages), set()),
    ],
)
def test_roles_whose_names_no_prompt_shows(render: Any, roles: set[str]) -> None:
    assert nameless_roles(render) == roles


@pytest.mark.parametrize("name", ["qwen3_5", "unknown_plain"])
def test_a_name_changes_no_prompt_of_a_template_that_reads_none(name: str) -> None:
    chat = family(name).chat
    assert "assistant" in chat.nameless_roles
    named = {**SAID, "name": "model"}
    asked = [USER, named, USER]
    assert chat.render(asked, None) == chat.render([USER, SAID, USER], None)


def test_a_name_that_no_prompt_shows_is_in_no_key() -> None:
    def key(*messages: Message, nameless: frozenset[str] = frozenset(ALL)) -> bytes:
        return chain_keys(messages, None, nameless=nameless)[-1]

    messages = (SYSTEM, USER, SAID, {"role": "tool", "content": "3"}, USER)
    named = [{**m, "name": "n"} for m in messages]
    assert key(*named) == key(*messages)
    assert key({**SYSTEM, "role": "developer", "name": "n"}, USER) == key(SYSTEM, USER)
    for role in ALL:
        assert key(*named, nameless=frozenset(ALL - {role})) != key(*messages)
    # A value that is no text is refused where it is rendered, so it is not passed over.
    assert key(USER, {**SAID, "name": 5}) != key(USER, SAID)
    assert key({"role": [], "name": "n"}) != key({"role": []})
