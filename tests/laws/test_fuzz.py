"""Arbitrary bodies and arbitrary outputs over each API: an answer or a clear refusal, streams that
come to the whole answer, and a true record."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from any_agent.completions.call_types import Head
from any_agent.completions.completer import Completer
from any_agent.errors import AnyAgentError, UnsupportedParameter
from any_agent.record import InteractionTree
from any_agent.types import Interaction
from tests.support.families import Family, family
from tests.support.laws.apis import APIS, CHAT, MESSAGES, RESPONSES, Api, Asked, Given, results_of
from tests.support.laws.bodies import BODIES, FIXED, SAID
from tests.support.laws.cases import FAMILIES, label
from tests.support.laws.checks import check_parsing
from tests.support.laws.record import heard
from tests.support.laws.spoken import checked, require_same
from tests.support.laws.talk import TOOLS
from tests.support.laws.voices import Voice, sampled

FEW = {("qwen3", True), ("llama3", False), ("gpt_oss", False)}
SHORT, LONG = {"chat": 10, "responses": 25, "messages": 25}, {"chat": 250}
"""Examples of each family; of the newer APIs 400 in the long form."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        long = metafunc.config.getoption("--long")
        pairs = [
            pytest.param(case, api, id=f"{label(case)}-{api.name}")
            for case in FAMILIES
            for api in APIS
            if api is CHAT or long or case in FEW
        ]
        metafunc.parametrize(("case", "api"), pairs)


@pytest.fixture
def quiet(request: pytest.FixtureRequest, api: Api) -> settings:
    long = request.config.getoption("--long")
    return settings(
        max_examples=LONG.get(api.name, 400) if long else SHORT[api.name],
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )


async def said(
    fam: Family, tree: InteractionTree, api: Api, body: dict[str, Any], ids: list[int]
) -> Given:
    """The answer, streamed and whole, checked against its interaction; raises AnyAgentError."""
    voice = Voice(fam.chat.decode, random.Random(len(ids)))
    voice.answer = lambda _: ids
    completer = Completer(voice, fam.chat, context_length=4096)
    asked = checked(api, body, fam.chat, tree)
    prepared = completer.prepare(asked.call, tree)
    done, deltas = await sampled(completer, prepared, tree, stream=True)
    node = done.interaction
    assert voice.seen[node.id] == tree.prompt_ids(node.id).tolist()
    assert voice.said[node.id] == node.output_ids.tolist()
    tools = asked.call.callable_tools or None
    check_parsing(fam, tree, node, tools, tuple(asked.call.gconfig.stop))
    shape = asked.answer(Head.of(prepared), 0)
    events = [shape.start(0), *map(shape.delta, deltas), shape.end(0, node), shape.last([node])]
    (streamed,) = api.streamed(b"".join(events))
    (whole,) = api.whole(asked.answer(Head.of(prepared), 0).whole([node]))
    require_same(streamed, whole)
    return whole


async def attempt(
    fam: Family, tree: InteractionTree, api: Api, body: Any, ids: list[int]
) -> Given | AnyAgentError:
    before = len(tree)
    try:
        return await said(fam, tree, api, body, ids)
    except AnyAgentError as error:
        assert 400 <= error.status < 500, error
        assert error.code and str(error)
        assert len(str(error)) < 2000, "an error grows with what was sent"
        assert len(tree) == before
        return error


def test_any_body_is_answered_or_refused(case: tuple[str, bool], api: Api, quiet: settings) -> None:
    fam = family(case[0], thinking=case[1])

    @quiet
    @given(BODIES[api.name], st.booleans(), SAID)
    def run(body: dict[str, Any], tools: bool, ids: list[int]) -> None:
        more = FIXED[api.name] if tools else {}
        asyncio.run(attempt(fam, InteractionTree(), api, body | more, ids))

    run()


def test_any_output_is_told_as_it_was_and_can_be_continued(
    case: tuple[str, bool], api: Api, quiet: settings
) -> None:
    fam = family(case[0], thinking=case[1])

    @quiet
    @given(
        st.lists(SAID, min_size=1, max_size=4),
        st.booleans(),
        st.booleans(),
        st.sampled_from([(), ("a",)]),
    )
    @example([fam.encode("a<think>b</think>c<tool_call>")], True, False, ())
    def run(outputs: list[list[int]], tools: bool, named: bool, stop: tuple[str, ...]) -> None:
        tree = InteractionTree()
        messages: list[Any] = [{"role": "user", "content": "go"}]
        parent: Interaction | None = None
        # A template without tools is refused any; Responses has no stop strings.
        shown = TOOLS if tools and fam.spec.calls else None
        stop = () if api is RESPONSES else stop
        for ids in outputs:
            previous = named and api is RESPONSES and parent is not None
            body = api.body(Asked(messages, shown, previous=previous, stop=stop))
            spoken = [i % fam.chat.vocab_size for i in ids]
            answer = asyncio.run(attempt(fam, tree, api, body, spoken))
            assert isinstance(answer, Given), answer
            node = tree[answer.interaction]
            assert heard(node.output_message).keys() == heard(answer).keys()
            if parent is not None:
                before = [*tree.prompt_ids(parent.id), *parent.output_ids]
                assert node.parent_id == parent.id
                assert tree.prompt_ids(node.id)[: len(before)].tolist() == before
            following = results_of(answer) or [{"role": "user", "content": "on"}]
            messages = [*messages, answer, *following]
            parent = node

    run()


ITEMS = """web_search_call file_search_call computer_call code_interpreter_call
image_generation_call mcp_call local_shell_call compaction no_such_item"""
BLOCKS = """image document search_result server_tool_use web_search_tool_result mcp_tool_use
container_upload no_such_block"""


def test_kinds_of_content_that_are_not_served_are_named_in_the_refusal() -> None:
    """Items of Responses, blocks of Messages, and tools that their own servers run."""
    go, fam = [{"role": "user", "content": "go"}], family("llama3")
    parts: list[tuple[Api, dict[str, Any], str]] = [
        (RESPONSES, {"input": [{"type": kind, "id": "x"}]}, kind) for kind in ITEMS.split()
    ]
    for kind in BLOCKS.split():
        body = {"max_tokens": 8, "messages": [{"role": "user", "content": [{"type": kind}]}]}
        parts.append((MESSAGES, body, kind))
    for api, body, kind in parts:
        error = asyncio.run(attempt(fam, InteractionTree(), api, body, [1]))
        assert isinstance(error, AnyAgentError) and kind in str(error), error
        assert (error.status, error.param[-3:]) == (400, "[0]"), error  # type: ignore[index]
    for api, names in (
        (RESPONSES, "computer local_shell x"),
        (MESSAGES, "web_search_20250305 bash_20250124 code_execution_20250522"),
    ):
        for kind in names.split():
            tool = {"type": kind} | ({"name": "t"} if api is MESSAGES else {})
            body = api.body(Asked(go)) | {"tools": [tool]}
            error = asyncio.run(attempt(fam, InteractionTree(), api, body, [1]))
            assert isinstance(error, UnsupportedParameter) and kind in str(error), error
