"""Random sessions whose agents speak Responses, Messages and chat, in process.

What a stream comes to, read by each API's own SDK, is what the whole answer of the same ids says.
"""

from __future__ import annotations

import random
from typing import Any

import orjson

from any_agent.chat import ChatFormat
from any_agent.completions.apis import all_apis
from any_agent.completions.call_types import Completion, Head
from any_agent.completions.parsed_request import ParseContext, ResponseEncoder
from any_agent.completions.parsed_request import ParsedRequest as Checked
from any_agent.record import InteractionTree
from any_agent.types import GenerationHyperparameters, Message, SessionMode
from tests.support.families import Family
from tests.support.laws.apis import APIS, MESSAGES, RESPONSES, Api, Asked, Given
from tests.support.laws.apis.responses import last_response
from tests.support.laws.clients import echo
from tests.support.laws.record import heard
from tests.support.laws.talk import Session, Tally, Thread

CONTEXT = 4096
HABITS: dict[str, tuple[Api, ...]] = {
    "responses": (RESPONSES,),
    "named": (RESPONSES,),
    "messages": (MESSAGES,),
    "two": (RESPONSES, MESSAGES),
    "all": APIS,
}
"""The APIs that an agent speaks; ``named``: it names the answer before, where it can."""


class MixedSession(Session):
    """One session whose agents choose an API for each call."""

    def __init__(
        self, fam: Family, habit: str, seed: str, tally: Tally, *, meddles: bool = False
    ) -> None:
        super().__init__(fam, echo, seed, tally, meddles=meddles)
        self._apis = HABITS[habit]
        self._api = self._apis[0]
        self._names = habit in ("named", "all")

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
        rng = self.rng
        self._api = api = rng.choice(self._apis)
        if stop and api is RESPONSES:
            stop.clear()
        asked = Asked(
            thread.messages,
            thread.tools,
            stream=stream,
            stop=tuple(stop),
            previous=api is RESPONSES and self._names and _can_name(thread, rng),
        )
        body = orjson.loads(orjson.dumps(api.body(asked)))
        call = checked(api, body, self.fam.chat, self.tree)
        prepared = self.completer.prepare(call.call, self.tree)
        done, deltas = await self._sampled(prepared, stream=stream)
        node = done.interaction

        def answer() -> ResponseEncoder:
            return call.answer(Head.of(prepared), self.voice.version)

        (whole,) = api.whole(answer().whole([node]))
        if stream:
            shape = answer()
            events = [shape.start(0), *map(shape.delta, deltas), shape.end(0, node)]
            (given,) = api.streamed(b"".join([*events, shape.last([node])]))
            require_same(given, whole)
        assert whole.interaction == node.id
        return done, _dropped(whole, rng)


def checked(api: Api, body: Any, chat: ChatFormat, tree: InteractionTree) -> Checked:
    """As the service does; raises AnyAgentError."""
    context = ParseContext(
        SessionMode.TRAIN,
        GenerationHyperparameters(max_new_tokens=512),
        "m",
        chat.renderer.known_settings,
        chat=chat,
        context_length=CONTEXT,
        tree=tree,
    )
    (registered,) = (each for each in all_apis() if each.name == api.name)
    return registered.parse(body, context)


def require_same(given: Given, whole: Given) -> None:
    """A stream and the whole answer of the same ids."""
    assert heard(given) == heard(whole)
    assert given.interaction == whole.interaction and given.finish == whole.finish
    if given.api != "chat":
        assert given.whole == whole.whole


def _can_name(thread: Thread, rng: random.Random) -> bool:
    """Whether an answer in it is as it was given, and everything before as it was said."""
    return last_response(thread.messages) is not None and rng.random() < 0.8


def _dropped(given: Given, rng: random.Random) -> Given:
    """Without its reasoning, now and then, as many agents send an answer back."""
    kept = (
        [part for part in given.raw if part["type"] not in _THOUGHT] if given.api != "chat" else []
    )
    if not kept or rng.random() < 0.7:
        return given
    return Given.by(
        given.api,
        {k: v for k, v in given.items() if k != "reasoning_content"},
        interaction=given.interaction,
        finish=given.finish,
        raw=kept,
        whole=given.whole,
    )


_THOUGHT = ("reasoning", "thinking")
