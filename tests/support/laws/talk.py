"""One random session, in process: agents, branches, compaction, and what the laws say of it."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from any_agent.completions.call_types import Completion, Delta, Prepared
from any_agent.completions.completer import Completer
from any_agent.completions.params.call import ParseSettings
from any_agent.completions.params.parse import parse_chat
from any_agent.record import InteractionTree
from any_agent.types import Continuation, GenerationHyperparameters, Message, SessionMode
from tests.support.families import Family
from tests.support.laws.checks import (
    check_continuation,
    check_conversation,
    check_message,
    check_parsing,
    merged,
)
from tests.support.laws.clients import Client, meddle
from tests.support.laws.outputs import random_output, words
from tests.support.laws.voices import Voice

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
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        return self.exact / max(1, self.expected)


class Session:
    """One session's agents over one interaction tree."""

    def __init__(
        self, fam: Family, client: Client, seed: str, tally: Tally, *, meddles: bool = False
    ) -> None:
        """``meddles``: every other call that goes on says something else about the past."""
        self.fam = fam
        self.rng = random.Random(seed)
        self.tree = InteractionTree()
        self.voice = Voice(fam.chat.decode, self.rng)
        self.completer = Completer(self.voice, fam.chat, context_length=4096)
        self._client = client
        self._tally = tally
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
        self._tally.kinds[output.kind] += 1
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
        """Return the messages that the last request of the thread has sent."""
        return thread.messages

    async def _complete(
        self, thread: Thread, stop: list[str], *, stream: bool
    ) -> tuple[Completion, Message]:
        """The call's end, and its answer as the client sends it back."""
        body = {"messages": thread.messages, "tools": thread.tools, "stop": stop}
        call = parse_chat(
            body,
            ParseSettings(SessionMode.TRAIN, GenerationHyperparameters(max_new_tokens=512), "m"),
        )
        done, deltas = await self._sampled(self.completer.prepare(call, self.tree), stream=stream)
        message = done.interaction.output_message
        if stream:
            assert merged(delta.message for delta in deltas) == _comparable(message)
        return done, self._client(json.loads(json.dumps(message)), self.rng)

    async def _sampled(self, prepared: Prepared, *, stream: bool) -> tuple[Completion, list[Delta]]:
        deltas: list[Delta] = []
        async for item in self.completer.run(prepared, session_id="s", stream=stream):
            if isinstance(item, Completion):
                self.tree.add(item.interaction, item.key)
                return item, deltas
            deltas.append(item)
        raise AssertionError("a call ends with its completion")


def _comparable(message: Message) -> Message:
    return {k: v for k, v in message.items() if v is not None and k != "role" and v != ""}
