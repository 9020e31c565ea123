"""A conversation through the code that serves agents, with an engine that recites given ids."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from any_agent.chat import ChatFormat, MessageDelta, ParsedMessage, merge_deltas
from any_agent.completions.call_types import Completion, Delta
from any_agent.completions.completer import Completer
from any_agent.completions.params.call import ParseSettings
from any_agent.completions.params.parse import parse_chat
from any_agent.engine import Capabilities
from any_agent.record import InteractionTree
from any_agent.types import (
    GenerationChunk,
    GenerationHyperparameters,
    Message,
    ModelRequest,
    SessionMode,
    Tool,
)

_CONTEXT = 1 << 20


class ScriptedConversation:
    """The calls of one session; each answer is recorded, so that the next call can continue it."""

    def __init__(self, chat: ChatFormat, tools: list[Tool] | None) -> None:
        self._engine = _RecitingEngine(frozenset(chat.stop_token_ids))
        self._completer = Completer(self._engine, chat, context_length=_CONTEXT)
        self._tools = tools
        self.tree = InteractionTree()

    async def call(
        self, messages: Sequence[Message], output: Sequence[int], *, step: int | None = None
    ) -> tuple[Completion, list[MessageDelta]]:
        """Answer the messages with the ids ``output``, ``step`` at a time."""
        body: dict[str, Any] = {"model": "policy", "messages": list(messages)}
        if self._tools:
            body["tools"] = self._tools
        sampling = GenerationHyperparameters()
        call = parse_chat(body, ParseSettings(SessionMode.TRAIN, sampling, "policy"))
        prepared = self._completer.prepare(call, self.tree)
        self._engine.output, self._engine.step = list(output), step or max(1, len(output))
        deltas: list[MessageDelta] = []
        completion: Completion | None = None
        completer: Any = self._completer
        async with aclosing(completer.run(prepared, session_id="doctor", stream=True)) as items:
            async for item in items:
                if isinstance(item, Delta):
                    deltas.append(item.message)
                else:
                    completion = item
        assert completion is not None
        self.tree.add(completion.interaction, completion.key)
        return completion, deltas


class _RecitingEngine:
    """An engine whose output is set beforehand."""

    version = 0

    def __init__(self, stop_ids: frozenset[int]) -> None:
        self._stop_ids = stop_ids
        self.output: list[int] = []
        self.step = 1

    async def generate(
        self, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[GenerationChunk]:
        ids = self.output
        for at in range(0, max(1, len(ids)), self.step):
            part = ids[at : at + self.step]
            last = at + self.step >= len(ids)
            ended = bool(ids) and ids[-1] in self._stop_ids
            yield GenerationChunk(
                part,
                [-0.5] * len(part),
                [0] * len(part),
                ("stop" if ended else "length") if last else None,
                ids[-1] if last and ended else None,
            )

    async def capabilities(self) -> Capabilities:
        return Capabilities()

    async def pause(self) -> None: ...

    async def resume(self, version: int) -> None: ...


def merged(deltas: Sequence[MessageDelta]) -> Message:
    """Return the message that a client assembles from a stream."""
    whole = merge_deltas(deltas)
    calls = [
        {key: value for key, value in call.items() if key != "index"}
        for call in whole.tool_calls or []
    ]
    return ParsedMessage(whole.content or "", whole.reasoning_content, calls).to_message()
