"""Arbitrary messages and arbitrary outputs: an answer or a clear refusal, and a true record."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from any_agent.completions.call_types import Completion
from any_agent.completions.completer import Completer
from any_agent.completions.params.call import ParseSettings
from any_agent.completions.params.parse import parse_chat
from any_agent.errors import AnyAgentError
from any_agent.record import InteractionTree
from any_agent.types import GenerationHyperparameters, Interaction, SessionMode
from tests.support.families import Family, family
from tests.support.laws.cases import FAMILIES, label
from tests.support.laws.checks import check_parsing, merged
from tests.support.laws.talk import TOOLS
from tests.support.laws.voices import Voice

SAMPLING = GenerationHyperparameters(max_new_tokens=256)
SHORT, LONG = 10, 250
"""Examples of each family."""

TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "<think>", "</think>x", "<tool_call>", "<|im_end|>", "<|start|>assistant", "\ud800"]
    ),
    st.sampled_from(["long " * 200, "long " * 30_000]),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PART = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, TEXT),
    st.sampled_from(
        [
            {"type": "image_url", "image_url": {"url": "x"}},
            {"type": "input_audio"},
            {"type": "text"},
        ]
    ),
    JSON,
)
CONTENT = st.one_of(TEXT, st.none(), st.lists(PART, max_size=3), JSON)
CALL = st.one_of(
    st.builds(
        lambda name, arguments: {
            "id": "call_1",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
        TEXT,
        st.sampled_from(["{}", '{"a": 1}', '{"a"', "", "[]"]) | JSON,
    ),
    JSON,
)
ROLE = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "x"])
MESSAGE = st.one_of(
    st.fixed_dictionaries(
        {"role": ROLE, "content": CONTENT},
        optional={
            "tool_calls": st.lists(CALL, max_size=2),
            "tool_call_id": TEXT,
            "name": TEXT | st.none(),
            "reasoning_content": TEXT | JSON,
        },
    ),
    JSON,
)
SAID = st.one_of(
    # Noise, with every special token as likely as any other, and pieces of markup around it.
    st.lists(st.integers(0, 530), min_size=1, max_size=40),
    st.lists(st.integers(0, 24), min_size=1, max_size=12),
)


@pytest.fixture
def quiet(request: pytest.FixtureRequest) -> settings:
    return settings(
        max_examples=LONG if request.config.getoption("--long") else SHORT,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )


async def said(fam: Family, tree: InteractionTree, body: dict[str, Any], ids: list[int]) -> Any:
    """The call's interaction, checked; or the refusal."""
    rng = random.Random(len(ids))
    voice = Voice(fam.chat.decode, rng)
    voice.answer = lambda _: ids
    completer = Completer(voice, fam.chat, context_length=4096)
    call = parse_chat(body, ParseSettings(SessionMode.TRAIN, SAMPLING, "m"))
    prepared = completer.prepare(call, tree)
    deltas = []
    async for item in completer.run(prepared, session_id="s", stream=True):
        if isinstance(item, Completion):
            node = item.interaction
            tree.add(node, item.key)
            assert voice.seen[node.id] == tree.prompt_ids(node.id).tolist()
            assert voice.said[node.id] == node.output_ids.tolist()
            check_parsing(fam, tree, node, call.tools, tuple(body.get("stop") or ()))
            read = {k: v for k, v in node.output_message.items() if k != "role" and v}
            assert merged(deltas) == read
            return node
        deltas.append(item.message)
    raise AssertionError("a call ends with its completion")


@pytest.mark.parametrize("case", FAMILIES, ids=label)
def test_any_messages_are_answered_or_refused(case: tuple[str, bool], quiet: settings) -> None:
    fam = family(case[0], thinking=case[1])

    @quiet
    @given(st.lists(MESSAGE, max_size=5), st.booleans(), SAID)
    def run(messages: list[Any], tools: bool, ids: list[int]) -> None:
        body = {"messages": messages, "tools": TOOLS if tools else None}
        refused = asyncio.run(_attempt(fam, InteractionTree(), body, ids))
        if isinstance(refused, AnyAgentError):
            assert 400 <= refused.status < 500, refused
            assert refused.code and str(refused)

    run()


@pytest.mark.parametrize("case", FAMILIES, ids=label)
def test_any_output_is_recorded_as_it_was_and_gone_on_from(
    case: tuple[str, bool], quiet: settings
) -> None:
    fam = family(case[0], thinking=case[1])

    @quiet
    @given(st.lists(SAID, min_size=1, max_size=4), st.booleans(), st.sampled_from([(), ("a",)]))
    def run(outputs: list[list[int]], tools: bool, stop: tuple[str, ...]) -> None:
        tree = InteractionTree()
        messages: list[Any] = [{"role": "user", "content": "go"}]
        parent: Interaction | None = None
        # A template without tools is refused any.
        shown = TOOLS if tools and fam.spec.calls else None
        for ids in outputs:
            body = {"messages": messages, "tools": shown, "stop": list(stop)}
            node = asyncio.run(_attempt(fam, tree, body, [i % fam.chat.vocab_size for i in ids]))
            assert isinstance(node, Interaction), node
            if parent is not None:
                before = [*tree.prompt_ids(parent.id), *parent.output_ids]
                assert node.parent_id == parent.id
                assert tree.prompt_ids(node.id)[: len(before)].tolist() == before
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "3"}
                for call in node.output_message.get("tool_calls") or []
            ]
            messages = [
                *messages,
                node.output_message,
                *(results or [{"role": "user", "content": "on"}]),
            ]
            parent = node

    run()


async def _attempt(fam: Family, tree: InteractionTree, body: Any, ids: list[int]) -> Any:
    try:
        return await said(fam, tree, body, ids)
    except AnyAgentError as error:
        return error
