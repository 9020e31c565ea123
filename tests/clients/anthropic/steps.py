"""What an agent does with Anthropic's SDK; runs in an environment that has it."""

from __future__ import annotations

import json
from typing import Any

from anthropic import Anthropic, BadRequestError, beta_tool

MODEL = "claude-sonnet-4-5"
CALL: dict[str, Any] = {"model": MODEL, "max_tokens": 256}
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 and 3?"}]
THINKING = {"type": "enabled", "budget_tokens": 1024}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [{"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}]


def plain() -> dict[str, Any]:
    raw = Anthropic().messages.with_raw_response.create(**CALL, messages=ASK, system="You add.")
    answer = raw.parse()
    return {
        "content": [block.model_dump(exclude_none=True) for block in answer.content],
        "stop": answer.stop_reason,
        "output_tokens": answer.usage.output_tokens,
        "same id": raw.headers["x-any-agent-interaction"] == answer.id,
    }


def stream() -> dict[str, Any]:
    """Event by event, as they come."""
    kinds, text, stop, tokens = [], "", None, None
    for event in Anthropic().messages.create(**CALL, messages=ASK, stream=True):
        kinds.append(event.type)
        if event.type == "content_block_delta":
            text += event.delta.text
        elif event.type == "message_delta":
            stop, tokens = event.delta.stop_reason, event.usage.output_tokens
    assert kinds.count("content_block_delta") > 2
    order = list(dict.fromkeys(kinds))
    return {"kinds": order, "content": text, "stop": stop, "output_tokens": tokens}


def helper() -> dict[str, Any]:
    """The SDK's own accumulation of a stream, which is to equal the whole answer."""
    with Anthropic().messages.stream(**CALL, messages=ASK, tools=TOOLS) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    return {"streamed": text, "content": _blocks(final), "stop": final.stop_reason}


def three_turns() -> dict[str, Any]:
    """What goes back is the answer's blocks, as objects, as what they dump to, and as their text;
    what is cached moves."""
    messages: list[dict[str, Any]] = []
    for number, text in enumerate(("What is 2 and 3?", "And 1?", "And 2?")):
        cached = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
        ask = [*messages, {"role": "user", "content": [cached]}]
        answer = Anthropic().messages.create(**CALL, messages=ask)
        back: Any = answer.content
        if number == 1:
            back = [block.model_dump() for block in answer.content]
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": back}]
    return {"said": ["".join(_get(b, "text") for b in m["content"]) for m in messages[1::2]]}


def tools() -> dict[str, Any]:
    """A round trip: the call is carried out, its result goes back."""
    first = Anthropic().messages.create(**CALL, messages=ASK, tools=TOOLS)
    return _carried_out(first)


def tools_streamed() -> dict[str, Any]:
    with Anthropic().messages.stream(**CALL, messages=ASK, tools=TOOLS) as events:
        first = events.get_final_message()
    return _carried_out(first)


def runner() -> dict[str, Any]:
    """The SDK's own loop over calls and their results."""

    @beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

    answers = list(Anthropic().beta.messages.tool_runner(**CALL, messages=ASK, tools=[add]))
    kinds = [[block["type"] for block in _blocks(answer)] for answer in answers]
    return {"turns": kinds, "last": answers[-1].content[0].text}


def thinking() -> dict[str, Any]:
    """A call after thoughts; both go back with its result, and a question follows."""
    call = {**CALL, "tools": TOOLS, "thinking": THINKING, "max_tokens": 2048}
    messages = list(ASK)
    with Anthropic().messages.stream(**call, messages=messages) as events:
        thoughts = "".join(e.thinking for e in events if e.type == "thinking")
        first = events.get_final_message()
    messages += [{"role": "assistant", "content": first.content}, _results(first)]
    last = Anthropic().messages.create(**call, messages=messages)
    kinds = [b.type for b in first.content]
    return {"kinds": kinds, "thoughts": thoughts, "content": last.content[-1].text}


def counted() -> dict[str, Any]:
    """What a prompt comes to before it is sent, and what it came to."""
    asked = {"messages": ASK, "system": "You add.", "tools": TOOLS}
    counted = Anthropic().messages.count_tokens(model=MODEL, **asked).input_tokens
    used = Anthropic().messages.create(**CALL, **asked).usage
    return {"equal": counted == used.input_tokens > 0}


def stopped() -> dict[str, Any]:
    answer = Anthropic().messages.create(**CALL, messages=ASK, stop_sequences=["so"])
    short = Anthropic().messages.create(**{**CALL, "max_tokens": 2}, messages=ASK)
    return {
        "stop": [answer.stop_reason, answer.stop_sequence],
        "content": answer.content[0].text,
        "short": short.stop_reason,
    }


def structured() -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"total": {"type": "integer"}},
        "required": ["total"],
        "additionalProperties": False,
    }
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    answer = Anthropic().messages.create(**CALL, messages=ASK, output_config=wanted)
    return dict(json.loads(answer.content[0].text))


def refused() -> dict[str, Any]:
    """Errors come as the SDK's own classes, and are not tried again."""
    out = {}
    image = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    for name, fields in {
        "long": {"messages": [{"role": "user", "content": "many words " * 40000}]},
        "image": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": image}]}],
        },
        "unknown": {"messages": ASK, "extra_body": {"suffix": 1}},
    }.items():
        try:
            Anthropic().messages.create(**CALL, **fields)
        except BadRequestError as error:
            assert isinstance(error.body, dict)
            out[name] = [error.body["error"]["type"], error.body["error"]["code"]]
    return out


def _carried_out(first: Any) -> dict[str, Any]:
    (call,) = (block for block in first.content if block.type == "tool_use")
    messages = [*ASK, {"role": "assistant", "content": first.content}, _results(first)]
    last = Anthropic().messages.create(**CALL, messages=messages, tools=TOOLS)
    return {
        "stop": first.stop_reason,
        "name": call.name,
        "input": call.input,
        "content": last.content[0].text,
    }


def _results(answer: Any) -> dict[str, Any]:
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": [{"type": "text", "text": str(block.input["a"] + block.input["b"])}],
        }
        for block in answer.content
        if block.type == "tool_use"
    ]
    return {"role": "user", "content": results}


def _blocks(message: Any) -> list[dict[str, Any]]:
    out = [block.model_dump(exclude_none=True) for block in message.content]
    return [{k: v for k, v in block.items() if k != "id"} for block in out]


def _get(block: Any, name: str) -> Any:
    return block[name] if isinstance(block, dict) else getattr(block, name)
