"""A format together with tools, on the real engine: every answer is the one or the other."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from any_agent import EngineOpenAI
from any_agent.engine import SGLangEngine
from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.engine.embedded.server import EngineServer, listen
from tests.support.families import Family, family

SCHEMA = {
    "type": "object",
    "properties": {"value": {"type": "integer"}},
    "required": ["value"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "find_it")
]
ASK: list[Any] = [{"role": "user", "content": "Say a number, or look for one."}]
SEEDS = range(8)
MARKS = ("</think>", "<tool_call>", "</tool_call>", "<｜tool▁calls▁begin｜>")
FAMILIES = [("qwen3", False), ("qwen3_5", True), ("deepseek", False), ("gpt_oss", False)]


class Bench:
    """A family's random model behind a client, and what makes it come to an end."""

    def __init__(self, fam: Family, client: EngineOpenAI) -> None:
        self.fam = fam
        self.client = client
        chat = fam.chat
        short = ["}", '{"', '"', ":", "1", "add", ">"]
        ids = [
            i for text in short if len(ids := chat.encode(text, special=False)) == 1 for i in ids
        ]
        ids += [chat.tokenizer.get_vocab().get(mark) for mark in MARKS]
        self.bias = {str(i): 4 for i in [*ids, *fam.end_ids] if i is not None}

    async def ask(self, seed: int, **more: Any) -> Any:
        asked = {"tools": TOOLS, "response_format": FORMAT, "max_tokens": 400, "logprobs": True}
        return await self.client.chat.completions.create(
            model="m", messages=ASK, seed=seed, logit_bias=self.bias, **(asked | more)
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FAMILIES, ids=lambda p: p[0])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    name, thinking = request.param
    fam = family(name, thinking=thinking)
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(EmbeddedEngine.load(str(fam.weights_dir)))
        runner, port = await listen(EngineServer(engine, incremental=True), "127.0.0.1", 0)
        stack.push_async_callback(runner.cleanup)
        real = SGLangEngine(f"http://127.0.0.1:{port}", decode=fam.chat.decode)
        stack.push_async_callback(real.close)
        client = EngineOpenAI(real, fam.chat, mode="eval", context_length=4096)
        stack.push_async_callback(client.close)
        yield Bench(fam, client)


def kind_of(message: Any) -> str:
    """Which of the two an answer is; AssertionError for what is neither."""
    if message.tool_calls:
        assert not message.content
        for call in message.tool_calls:
            assert call.function.name in ("add", "find_it")
            assert isinstance(json.loads(call.function.arguments), dict)
        return "calls"
    jsonschema.validate(json.loads(message.content), SCHEMA)
    return "text"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.service
async def test_an_answer_with_tools_and_a_format_is_calls_or_of_the_format(bench: Bench) -> None:
    kinds = []
    for seed in SEEDS:
        answer = await bench.ask(seed)
        (choice,) = answer.choices
        recorded = bench.client.interactions[-1]
        assert recorded.untrainable_reason == "logit_bias"
        if choice.finish_reason == "length":
            continue
        kinds.append(kind_of(choice.message))
        assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)
        # Streaming says the same, under the same log-probabilities.
        content, arguments, logprobs = "", {}, []
        async for event in await bench.ask(seed, stream=True):
            (part,) = event.choices
            content += part.delta.content or ""
            for call in part.delta.tool_calls or ():
                arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
            logprobs += part.logprobs.content if part.logprobs else []
        assert content == (choice.message.content or "")
        calls = choice.message.tool_calls or ()
        assert list(arguments.values()) == [c.function.arguments for c in calls]
        told = [each.logprob for each in choice.logprobs.content]
        assert [each.logprob for each in logprobs] == pytest.approx(told, abs=1e-4)
        assert recorded.output_logprobs.tolist() == pytest.approx(told, abs=1e-4)
    assert set(kinds) == {"text", "calls"}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.service
async def test_a_format_alone_is_the_texts_also_after_reasoning(bench: Bench) -> None:
    """`tool_choice: none`; reasoning that the prompt has opened comes first, and is free."""
    ended = 0
    for seed in SEEDS:
        answer = await bench.ask(seed, tool_choice="none")
        (choice,) = answer.choices
        if choice.finish_reason != "length":
            assert kind_of(choice.message) == "text"
            ended += 1
    assert ended > 3
