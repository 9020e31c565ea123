"""Tools of a Messages request that are not shown at once: Anthropic's own, and deferred ones."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from any_agent.completions.completer import Completer
from any_agent.completions.messages.input_messages import MAX_SHOWN_BYTES
from any_agent.completions.prepare import count_tokens
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.record import InteractionTree
from any_agent.record.content_removal import strip_content
from any_agent.types import Continuation, Interaction
from tests.support.completions.messages import HELLO, parse
from tests.support.errors import fails_with
from tests.support.families import Family, family
from tests.support.families.spec import Call
from tests.support.laws.voices import Voice, sampled

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
SEARCH: dict[str, Any] = {"name": "search", "description": "Finds tools.", "input_schema": SCHEMA}
LOUD: dict[str, Any] = {
    "name": "shout",
    "description": "Says it loudly: ä.",
    "input_schema": SCHEMA,
    "defer_loading": True,
}
LATER = {**LOUD, "name": "later", "description": "Waits."}
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
REFERENCE = {"type": "tool_reference", "tool_name": "shout"}


def names(tools: Any) -> list[str]:
    return [tool["function"]["name"] for tool in tools or ()]


def result(*blocks: Any) -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "x", "content": [*blocks]}],
        }
    ]


def test_what_only_anthropic_runs_is_left_out_and_named() -> None:
    for kind in (
        *("web_search_20250305", "web_fetch_20250910", "code_execution_20250825"),
        *("tool_search_tool_regex_20251119", "advisor_20260301"),
    ):
        tool = {"type": kind, "name": "x", "strict": True}
        chat = parse(tools=[tool, SEARCH, tool]).chat
        assert names(chat.tools) == ["search"] and not chat.deferred
        assert chat.ignored == (f"tools.{kind}",)
        assert chat.recorded[f"tools.{kind}"] == [tool, tool]
        with fails_with(UnsupportedParameter, param="tools"):
            parse(refuses=True, tools=[tool, SEARCH])
        # With a schema of its own it is a function like any other.
        function = parse(tools=[{**tool, "input_schema": SCHEMA}]).chat
        assert (names(function.tools), function.ignored) == (["x"], ("tools.strict",))
    # It cannot be chosen.
    with fails_with(InvalidRequest, param="tool_choice"):
        parse(tools=[WEB, SEARCH], tool_choice={"type": "tool", "name": "web_search"})


def test_a_request_for_nothing_that_the_agent_can_run_is_refused() -> None:
    for choice in (None, {"type": "auto"}, {"type": "any"}):
        with fails_with(UnsupportedParameter, param="tools"):
            parse(tools=[WEB], tool_choice=choice)
    assert parse(tools=[WEB], tool_choice={"type": "none"}).chat.tools is None
    # What the agent runs needs a schema.
    for kind in ("bash_20250124", "text_editor_20250728", "memory_20250818", "mcp_toolset"):
        with fails_with(UnsupportedParameter, kind, param="tools"):
            parse(tools=[SEARCH, {"type": kind, "name": "x"}])


def test_a_deferred_tool_may_be_called_and_is_not_shown() -> None:
    chat = parse(tools=[LATER, SEARCH, LOUD]).chat
    assert (names(chat.tools), names(chat.deferred)) == (["search"], ["later", "shout"])
    assert names(chat.callable_tools) == ["search", "later", "shout"]
    assert not chat.ignored
    # One of several must be called, although the head shows one.
    assert parse(tools=[SEARCH, LOUD], tool_choice={"type": "any"}).chat.forced_call == ""
    assert not parse(tools=[SEARCH, LOUD], tool_choice={"type": "none"}).chat.callable_tools


def test_deferred_tools_that_nobody_could_find_are_shown_at_once() -> None:
    search = {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}
    chat = parse(tools=[search, LOUD]).chat
    assert names(chat.tools) == ["shout"] and not chat.deferred
    assert set(chat.ignored) == {f"tools.{search['type']}", "tools.defer_loading"}
    with fails_with(InvalidRequest, param="tools"):
        parse(tools=[LOUD, LATER])
    # Where none may be called, none needs to be found.
    assert parse(tools=[LOUD, LATER], tool_choice={"type": "none"}).chat.tools is None


def test_a_tool_is_deferred_or_not() -> None:
    for given in (False, None):
        assert names(parse(tools=[SEARCH, {**LOUD, "defer_loading": given}]).chat.deferred) == []
    for given in ("true", 0, []):
        with fails_with(InvalidRequest, param="tools"):
            parse(tools=[SEARCH, {**LOUD, "defer_loading": given}])


def test_a_reference_is_the_tools_definition() -> None:
    said = {"type": "text", "text": "Found: "}
    blocks = (said, REFERENCE, {**REFERENCE, "tool_name": "search"}, said)
    for choice in ({"type": "auto"}, {"type": "none"}):
        call = parse(tools=[SEARCH, LOUD], messages=result(*blocks), tool_choice=choice)
        before, *lines, after = call.chat.messages[0]["content"].split("\n")
        assert (before, after) == ("Found: <functions>", "</functions>Found: ")
        shown = [
            json.loads(x.removeprefix("<function>").removesuffix("</function>")) for x in lines
        ]
        assert [each["name"] for each in shown] == ["shout", "search"]
        assert shown[0] == {
            "name": "shout",
            "description": "Says it loudly: ä.",
            "parameters": SCHEMA,
        }


def test_a_reference_that_leads_nowhere_is_refused() -> None:
    place = "messages[0].content[0]"
    for name in ("nothing", "web_search", None, ["shout"]):
        block = {**REFERENCE, "tool_name": name}
        with fails_with(InvalidRequest, param=f"{place}.content[1].tool_name"):
            parse(tools=[SEARCH, LOUD, WEB], messages=result(REFERENCE, block))
    with fails_with(InvalidRequest, param=f"{place}.content[0].tool_name"):
        parse(tools=[SEARCH, LOUD], messages=result({"type": "tool_reference"}))
    # It stands in a tool's result alone.
    with fails_with(UnsupportedParameter, param=place):
        parse(tools=[SEARCH, LOUD], messages=[{"role": "user", "content": [REFERENCE]}])


def test_a_small_body_does_not_become_a_huge_conversation() -> None:
    tools = [SEARCH, {**LOUD, "description": "x" * 100_000}]
    shown = parse(tools=tools, messages=result(REFERENCE)).chat.messages[0]["content"]
    (line,) = [line for line in shown.split("\n") if line.startswith("<function>")]
    most = MAX_SHOWN_BYTES // len(line.removeprefix("<function>").removesuffix("</function>"))
    # A long conversation refers to a tool again in each of its results.
    within = [*result(*[REFERENCE] * (most - 2)), *result(REFERENCE), *result(REFERENCE)]
    said = parse(tools=tools, messages=within).chat.messages
    assert sum(message["content"].count(line) for message in said) == most
    for messages, place in (
        ([*within, *result(REFERENCE)], "messages[3].content[0].content[0]"),
        (result(*[REFERENCE] * 3000), f"messages[0].content[0].content[{most}]"),
    ):
        with fails_with(InvalidRequest, param=place):
            parse(tools=tools, messages=messages)


class Agent:
    """It speaks with a model of a family, whose answers are given."""

    def __init__(self, fam: Family) -> None:
        self.fam = fam
        self.voice = Voice(fam.chat.decode, random.Random(0))
        self.completer = Completer(self.voice, fam.chat, context_length=4096)
        self.tree = InteractionTree()
        self.messages: list[dict[str, Any]] = list(HELLO)

    async def asks(self, tools: list[dict[str, Any]], answer: list[int]) -> Interaction:
        call = parse(known=frozenset(), tools=tools, messages=self.messages).chat
        self.voice.answer = lambda _: answer
        counted = await count_tokens(self.completer, call, self.tree)
        prepared = self.completer.prepare(call, self.tree)
        assert counted == prepared.prompt_tokens
        done, _ = await sampled(self.completer, prepared, self.tree, stream=True)
        return done.interaction

    def runs(self, made: Interaction, *results: Any) -> None:
        """Send back an answer with a call, and what came of that."""
        (call,) = made.output_message["tool_calls"]
        name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
        use = {"type": "tool_use", "id": call["id"], "name": name, "input": given}
        done = {"type": "tool_result", "tool_use_id": call["id"], "content": [*results]}
        self.messages += [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [done]},
        ]


def test_an_answer_with_a_format_may_call_a_deferred_tool() -> None:
    fam = family("qwen3")
    form = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    call = parse(known=frozenset(), tools=[SEARCH, LOUD], **form).chat
    completer = Completer(Voice(fam.chat.decode, random.Random(0)), fam.chat, context_length=4096)
    (choice,) = completer.prepare(call, None).choices
    assert '"shout' in json.dumps(choice.gconfig.grammar).replace("\\", "")


FAMILIES = ["qwen3", "qwen3_5", "llama3", "glm", "deepseek", "gpt_oss"]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tool_that_is_found_continues_the_conversation_exactly(name: str) -> None:
    async def talk() -> None:
        fam = family(name)
        agent = Agent(fam)
        found = fam.say(calls=(Call("search", {"text": "loud"}),))
        first = await agent.asks([SEARCH, LATER], found)
        agent.runs(first, REFERENCE)
        # Declared only now, in another place of the list; its text is no number.
        loud = fam.say(calls=(Call("shout", {"text": "42"}),))
        second = await agent.asks([LOUD, SEARCH, LATER], loud)
        assert (second.parent_id, second.continuation) == (first.id, Continuation.EXACT)
        before = [*agent.tree.prompt_ids(first.id).tolist(), *first.output_ids.tolist()]
        prompt = agent.tree.prompt_ids(second.id).tolist()
        assert prompt[: len(before)] == before
        shown = fam.chat.decode(prompt[len(before) :])
        assert LOUD["description"] in shown and LATER["name"] not in shown
        (call,) = second.output_message["tool_calls"]
        assert call["function"]["name"] == "shout"
        assert json.loads(call["function"]["arguments"]) == {"text": "42"}
        # By what it has been shown, the record can read such an answer again.
        assert names(second.request["found_tools"]) == ["shout"]
        assert "found_tools" not in first.request
        assert "found_tools" not in strip_content(second).request
        agent.runs(second, {"type": "text", "text": "done"})
        third = await agent.asks([LOUD, SEARCH], fam.say("Good."))
        assert (third.parent_id, third.continuation) == (second.id, Continuation.EXACT)

    asyncio.run(talk())
