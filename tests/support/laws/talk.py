"""One random session, in process: agents, branches, compaction, and what the laws say of it.

What a stream comes to, read by each API's own SDK, is what the whole answer of the same ids says.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import orjson

from any_agent.completions.call_types import Completion, Head
from any_agent.completions.completer import Completer
from any_agent.record import InteractionTree
from any_agent.types import Continuation, Message
from tests.support.families import Family
from tests.support.laws.apis import RESPONSES, Api, Asked, Given
from tests.support.laws.apis.responses import last_response
from tests.support.laws.checks import (
    check_continuation,
    check_conversation,
    check_message,
    check_parsing,
)
from tests.support.laws.clients import Client, meddle
from tests.support.laws.outputs import random_output, words
from tests.support.laws.spoken import checked, require_same
from tests.support.laws.voices import Voice, sampled

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {}, "city": {"type": "string"}},
            },
        },
    }
]


@dataclass
class Thread:
    """One conversation that an agent holds."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    answers: int = 0
    """Recorded answers that it carries."""

    def fork(self, length: int) -> Thread:
        kept = self.messages[:length]
        return Thread(kept, self.tools, sum(m["role"] == "assistant" for m in kept))


@dataclass
class Tally:
    """What many sessions came to."""

    calls: int = 0
    expected: int = 0
    """Calls that go on from a recorded answer."""
    exact: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        return self.exact / max(1, self.expected)


class Session:
    """One session's agents over one interaction tree, who choose an API for each call."""

    def __init__(
        self,
        fam: Family,
        apis: tuple[Api, ...],
        client: Client,
        seed: str,
        tally: Tally,
        *,
        names: bool = False,
        meddles: bool = False,
    ) -> None:
        """``names``: a call of Responses names the answer before it, where it can. ``meddles``:
        every other call that goes on says something else about the past."""
        self.fam = fam
        self.rng = random.Random(seed)
        self.tree = InteractionTree()
        self.voice = Voice(fam.chat.decode, self.rng)
        self.completer = Completer(self.voice, fam.chat, context_length=4096)
        self._apis = apis
        self._api = apis[0]
        self._client = client
        self._tally = tally
        self._names = names
        self._meddles = meddles
        self._threads: list[Thread] = []

    async def run(self, calls: int) -> None:
        for _ in range(calls):
            thread = self._next_thread()
            await self._call(thread)
            self._threads = self._threads[-4:]

    def _next_thread(self) -> Thread:
        """A new one (a root, a sub-agent), one that goes on, a branch, or a compaction."""
        rng = self.rng
        kind = rng.choices(("on", "root", "branch", "compact", "again"), (70, 8, 10, 6, 6))[0]
        if kind == "root" or not self._threads:
            thread = Thread(self._opening(), TOOLS if rng.random() < 0.6 else None)
            if not self.fam.spec.calls:
                thread.tools = None
            self._threads.append(thread)
            return thread
        thread = rng.choice(self._threads)
        if kind == "again":
            at = max(i for i, m in enumerate(thread.messages) if m["role"] == "assistant")
            thread = thread.fork(at)
            self._threads.append(thread)
            return thread
        if kind == "branch":
            places = [i + 1 for i, m in enumerate(thread.messages) if m["role"] == "assistant"]
            thread = thread.fork(rng.choice(places))
            self._threads.append(thread)
        if kind == "compact":
            summary = {"role": "user", "content": "Until now: " + words(rng)}
            thread = Thread([*self._opening()[:-1], summary], thread.tools)
            self._threads.append(thread)
            return thread
        thread.messages = [*thread.messages, *self._reply(thread.messages[-1])]
        return thread

    def _opening(self) -> list[Message]:
        ask = {"role": "user", "content": words(self.rng)}
        if self.rng.random() < 0.6:
            return [{"role": "system", "content": words(self.rng, 4)}, ask]
        return [ask]

    def _reply(self, answer: Message) -> list[Message]:
        calls = answer.get("tool_calls") or []
        results: list[Message] = [
            {"role": "tool", "tool_call_id": call["id"], "content": words(self.rng, 5)}
            for call in calls
        ]
        if not results or self.rng.random() < 0.1:
            results.append({"role": "user", "content": words(self.rng)})
        return results

    async def _call(self, thread: Thread) -> None:
        rng = self.rng
        if self._meddles and thread.answers and rng.random() < 0.5:
            thread.messages, thread.tools = meddle(thread.messages, thread.tools, rng)
        output = random_output(self.fam, rng, tools=thread.tools is not None)
        self.voice.answer = lambda _: output.ids
        stop = [rng.choice(("the", "4", "🙂", "\n"))] if rng.random() < 0.08 else []
        stream = rng.random() < 0.5
        done, answer = await self._complete(thread, stop, stream=stream)
        node = done.interaction
        self._tally.calls += 1
        where = f"{self.fam.name}: {output}"
        assert self.voice.seen[node.id] == self.tree.prompt_ids(node.id).tolist(), where
        assert self.voice.said[node.id] == node.output_ids.tolist(), where
        check_parsing(self.fam, self.tree, node, thread.tools, tuple(stop))
        if output.content is not None and not stop:
            check_message(self.fam, node.output_message, output, thread.tools)
        self._count(thread, node)
        thread.messages = [*thread.messages, answer]
        thread.answers += 1

    def _count(self, thread: Thread, node: Any) -> None:
        tally = self._tally
        if thread.answers:
            tally.expected += 1
        if node.continuation is Continuation.EXACT:
            tally.exact += 1
            messages = self._sent(thread)
            check_conversation(self.tree, node, messages, thread.tools)
            check_continuation(self.fam, self.tree, node, messages, thread.tools)
        elif thread.answers:
            tally.reasons[node.branch_reason or "found no parent"] += 1

    def _sent(self, thread: Thread) -> list[Message]:
        """Return the thread's messages without the reasoning that the API's body has no place for:
        that of answers which another API gave, or which were changed."""
        if self._api.name == "chat":
            return thread.messages
        return [
            m
            if isinstance(m, Given) and m.api == self._api.name
            else {k: v for k, v in m.items() if k != "reasoning_content"}
            for m in thread.messages
        ]

    async def _complete(
        self, thread: Thread, stop: list[str], *, stream: bool
    ) -> tuple[Completion, Message]:
        """The call's end, and its answer as the client sends it back."""
        rng = self.rng
        self._api = api = rng.choice(self._apis)
        if stop and api is RESPONSES:
            stop.clear()
        named = api is RESPONSES and self._names and last_response(thread.messages) is not None
        asked = Asked(
            thread.messages,
            thread.tools,
            stream=stream,
            stop=tuple(stop),
            previous=named and rng.random() < 0.8,
        )
        body = orjson.loads(orjson.dumps(api.body(asked)))
        call = checked(api, body, self.fam.chat, self.tree)
        prepared = self.completer.prepare(call.call, self.tree)
        done, deltas = await sampled(self.completer, prepared, self.tree, stream=stream)
        node = done.interaction
        head = Head.of(prepared)
        (whole,) = api.whole(call.answer(head, self.voice.version).whole([node]))
        if stream:
            shape = call.answer(head, self.voice.version)
            events = [shape.start(0), *map(shape.delta, deltas), shape.end(0, node)]
            (given,) = api.streamed(b"".join([*events, shape.last([node])]))
            require_same(given, whole)
        assert whole.interaction == node.id
        return done, self._client(_dropped(whole, rng), rng)


def _dropped(given: Given, rng: random.Random) -> Given:
    """Without its reasoning, now and then, as many agents send an answer of a newer API back."""
    thoughts = ("reasoning", "thinking")
    newer = given.api != "chat"
    kept = [part for part in given.raw if part["type"] not in thoughts] if newer else []
    if not kept or rng.random() < 0.7:
        return given
    message = {k: v for k, v in given.items() if k != "reasoning_content"}
    return Given(
        message,
        api=given.api,
        interaction=given.interaction,
        finish=given.finish,
        raw=kept,
        whole=given.whole,
    )
