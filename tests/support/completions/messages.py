"""Anthropic's SDK as the reader of answers, and answers to read."""

from __future__ import annotations

import json
from typing import Any

from anthropic.types import Message
from pydantic import TypeAdapter

from any_agent.completions.call_types import Head
from any_agent.completions.messages.encoder import MessagesEncoder
from any_agent.completions.messages.parse import MessagesCall, parse_messages
from any_agent.completions.params.call import ParseSettings
from any_agent.types import GenerationHyperparameters, Interaction, SessionMode
from tests.support.laws.apis import messages
from tests.support.laws.apis.given import events_of
from tests.support.records import make_interaction

RUN = GenerationHyperparameters(max_new_tokens=100)
HELLO = [{"role": "user", "content": "hi"}]
SWITCH = frozenset({"enable_thinking"})


def parse(*, known: frozenset[str] = SWITCH, refuses: bool = False, **fields: Any) -> MessagesCall:
    """The least that can be asked, and these; ``refuses``: unknown parameters are not recorded."""
    settings = ParseSettings(
        SessionMode.EVAL,
        RUN,
        "policy",
        known_settings=known,
        unknown="refuse" if refuses else "record",
    )
    return parse_messages({"messages": HELLO, "max_tokens": 50, **fields}, settings)


def answer_of(**fields: Any) -> MessagesEncoder:
    call = parse(**fields)
    return MessagesEncoder(call, Head("msg_1", 0.0, call.chat.gconfig, 7))


def interaction_of(message: dict[str, Any], finish: str = "stop", **request: Any) -> Interaction:
    return make_interaction(
        "msg_1",
        prompt=[0] * 7,
        output=[0] * 3,
        output_message={"role": "assistant", **message},
        finish_reason=finish,
        gconfig=RUN,
        request=request,
    )


def whole_of(data: bytes) -> Message:
    """A whole answer, by the SDK's own model and strictly."""
    message: Message = TypeAdapter(Message).validate_json(data, strict=True)
    return message


def accumulated(data: bytes) -> Message:
    """What the SDK makes of a stream, whose order is held."""
    return whole_of(json.dumps(messages.accumulated(events_of(data))).encode())
