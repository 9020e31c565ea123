"""One chat request + one interaction tree -> one recorded completion, without HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.completions.call_types import Completion, Delta
from any_agent.completions.completer import Completer
from any_agent.errors import ContextLengthExceeded, EngineUnavailable
from any_agent.record import InteractionTree, strip_content
from any_agent.types import (
    Continuation,
    GenerationChunk,
    Message,
    ModelRequest,
    Tool,
)
from tests.support.completions.params import parse
from tests.support.errors import fails_with
from tests.support.laws.voices import Voice, sampled

USER: Message = {"role": "user", "content": "Say a number."}
FIND: Tool = {"type": "function", "function": {"name": "find", "parameters": {}}}


class Engine(Voice):
    """Answers with queued ids."""

    def __init__(self, chat: ChatFormat) -> None:
        super().__init__(chat.decode, Random(0))
        self.answers: list[list[int]] = []
        self.requests: list[ModelRequest] = []
        self.answer = self._next

    def _next(self, request: ModelRequest) -> list[int]:
        self.requests.append(request)
        return self.answers.pop(0)


@pytest.fixture(scope="module")
def chat(tiny_model_dir: Path) -> ChatFormat:
    return load_chat_format(str(tiny_model_dir), enable_thinking=False)


async def complete(
    completer: Completer,
    tree: InteractionTree,
    messages: list[Message],
    *,
    stream: bool = False,
    **fields: object,
) -> tuple[Completion, list[Delta]]:
    call = parse(messages=messages, **fields)
    return await sampled(completer, completer.prepare(call, tree), tree, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_continue_exactly(chat: ChatFormat, stream: bool) -> None:
    engine, tree = Engine(chat), InteractionTree()
    completer = Completer(engine, chat, context_length=2048)
    messages = [USER]
    previous: list[int] = []
    asked: Any = {"stream": stream, "stop": ["zz"], "tools": [FIND]}
    for turn in range(4):
        ids = [*chat.tokenizer.encode(f"it is {turn}"), chat.stop_token_ids[0]]
        engine.answers.append(ids)
        done, deltas = await complete(completer, tree, messages, **asked)
        assert done.interaction.output_message["content"] == f"it is {turn}"
        assert [i for d in deltas for i in d.output_ids] == (ids if stream else [])
        assert "".join(d.message.content or "" for d in deltas) == (
            f"it is {turn}" if stream else ""
        )
        interaction = done.interaction
        assert interaction.output_ids.tolist() == ids
        assert interaction.trainable
        # Only a root stores the tools.
        assert interaction.tools == (None if turn else [FIND])
        if turn:
            assert interaction.continuation is Continuation.EXACT
            before = [*engine.requests[-2].input_ids, *previous]
            assert list(engine.requests[-1].input_ids[: len(before)]) == before
        previous = ids
        messages = [*messages, interaction.output_message, USER]
    assert tree.prompt_ids(interaction.id).tolist() == list(engine.requests[-1].input_ids)
    assert len(tree.path(interaction.id)) == 4
    gconfig = engine.requests[0].gconfig
    assert set(gconfig.stop_token_ids) >= set(chat.stop_token_ids) and gconfig.stop == ("zz",)


async def test_ids_of_calls_are_unique_and_read_again_the_same(chat: ChatFormat) -> None:
    engine, tree = Engine(chat), InteractionTree()
    completer = Completer(engine, chat, context_length=2048)
    again = parse(messages=[USER], tools=[FIND])
    said = chat.encode(
        '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>', special=False
    )
    ids = set()
    for _ in range(2):
        engine.answers.append([*said, chat.stop_token_ids[0]])
        done, _ = await complete(completer, tree, [USER], tools=[FIND])
        (call,) = done.interaction.output_message["tool_calls"]
        ids.add(call["id"])
        kept = InteractionTree()
        kept.add(strip_content(done.interaction))
        read = completer.recorded_answer(again, kept, done.interaction.id)
        assert read.output_message == done.interaction.output_message
    assert len(ids) == 2


async def test_the_context_bounds_the_budget(chat: ChatFormat) -> None:
    engine = Engine(chat)
    length = len(chat.render([USER], None))
    engine.answers.append([30])
    await complete(Completer(engine, chat, context_length=length + 3), InteractionTree(), [USER])
    assert engine.requests[0].gconfig.max_new_tokens == 3
    full = Completer(engine, chat, context_length=length)
    with fails_with(ContextLengthExceeded, f"are {length} tokens"):
        await complete(full, InteractionTree(), [USER])
    with fails_with(ContextLengthExceeded, "messages and tools"):
        await complete(full, InteractionTree(), [USER], tools=[FIND])


async def test_what_cannot_fit_is_not_tokenised(
    chat: ChatFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[int] = []
    render = chat.render

    def counted(*args: Any, **fields: Any) -> list[int]:
        rendered.append(1)
        return render(*args, **fields)

    monkeypatch.setattr(chat, "render", counted)
    completer = Completer(Engine(chat), chat, context_length=32)
    most = 32 * chat.longest_token
    parts = [{"type": "text", "text": "x" * (most // 2)}, {"type": "text", "text": "x" * most}]
    for messages in ([{**USER, "content": "x" * (most + 1)}], [{**USER, "content": parts}]):
        with fails_with(ContextLengthExceeded, "characters"):
            await complete(completer, InteractionTree(), messages)
    with fails_with(ContextLengthExceeded, "33 messages"):
        await complete(completer, InteractionTree(), [{**USER, "content": ""}] * 33)
    assert not rendered
    # One character less might be that many of the longest token.
    with fails_with(ContextLengthExceeded, "tokens long"):
        await complete(completer, InteractionTree(), [{**USER, "content": "x" * most}])
    assert rendered


async def test_an_engine_that_gives_no_finish_reason_is_unavailable(chat: ChatFormat) -> None:
    async def endless(_: ModelRequest, *, stream: bool) -> AsyncGenerator[GenerationChunk]:
        yield GenerationChunk([30, 31], [-1.0] * 2, [4] * 2)

    engine = Engine(chat)
    engine.generate = endless  # type: ignore[method-assign]
    completer = Completer(engine, chat, context_length=2048)
    with pytest.raises(EngineUnavailable):
        await complete(completer, InteractionTree(), [USER])
