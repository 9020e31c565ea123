"""What an agent does with OpenAI's SDK over Responses; runs in an environment that has it."""

from __future__ import annotations

import json
from typing import Any

from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 and 3?"}]
CALL: dict[str, Any] = {"model": "gpt-4o"}
TOOLS = [
    {
        "type": "function",
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": False,
    }
]


class Sum(BaseModel):
    total: int


def plain() -> dict[str, Any]:
    raw = OpenAI().responses.with_raw_response.create(
        **CALL, input="What is 2 and 3?", instructions="You add."
    )
    answer = raw.parse()
    usage = answer.usage
    return {
        "content": answer.output_text,
        "status": answer.status,
        "output_tokens": usage.output_tokens,
        "adds up": usage.total_tokens == usage.input_tokens + usage.output_tokens,
        "same id": raw.headers["x-any-agent-interaction"] == answer.id,
    }


def stream() -> dict[str, Any]:
    """Event by event, as they come."""
    kinds, text, numbers, tokens = [], "", [], None
    for event in OpenAI().responses.create(**CALL, input=ASK, stream=True):
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.completed":
            tokens = event.response.usage.output_tokens
    in_order = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return {
        "kinds": list(dict.fromkeys(kinds)),
        "content": text,
        "in order": in_order and kinds.count("response.output_text.delta") > 2,
        "output_tokens": tokens,
    }


def helper() -> dict[str, Any]:
    """The SDK's own accumulation of a stream, which is to equal the whole answer."""
    with OpenAI().responses.stream(**CALL, input=ASK, tools=TOOLS) as events:
        deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        final = events.get_final_response()
    kept = OpenAI().responses.retrieve(final.id)
    return {
        "streamed": deltas,
        "content": final.output_text,
        "status": final.status,
        "calls": [[c.name, c.arguments] for c in final.output if c.type == "function_call"],
        "as kept": _items(final) == _items(kept),
    }


def three_turns() -> dict[str, Any]:
    """What goes back is the answer's items, as objects and as what they dump to."""
    said, talk = [], []
    for number, text in enumerate(("What is 2 and 3?", "And 1?", "And 2?")):
        talk.append({"role": "user", "content": text})
        answer = OpenAI().responses.create(**CALL, input=talk, store=False)
        said.append(answer.output_text)
        talk += _items(answer) if number == 1 else answer.output
    return {"said": said}


def previous() -> dict[str, Any]:
    """Three turns, of which each sends only what is new."""
    said, last = [], None
    for text in ("What is 2 and 3?", "And 1?", "And 2?"):
        answer = OpenAI().responses.create(**CALL, input=text, previous_response_id=last)
        said.append(answer.output_text)
        last = answer.id
    return {"said": said}


def tools() -> dict[str, Any]:
    """A round trip: the call is carried out, its result goes back."""
    return _carried_out(OpenAI().responses.create(**CALL, input=ASK, tools=TOOLS))


def tools_streamed() -> dict[str, Any]:
    with OpenAI().responses.stream(**CALL, input=ASK, tools=TOOLS) as events:
        parts = sum(e.type == "response.function_call_arguments.delta" for e in events)
        first = events.get_final_response()
    return {**_carried_out(first), "in parts": parts > 1}


def thinking() -> dict[str, Any]:
    """A call after thoughts; both go back with its result."""
    call = {**CALL, "tools": TOOLS, "reasoning": {"effort": "medium"}, "store": False}
    include: Any = ["reasoning.encrypted_content"]
    with OpenAI().responses.stream(**call, input=ASK, include=include) as events:
        thoughts = "".join(e.delta for e in events if e.type == "response.reasoning_text.delta")
        first = events.get_final_response()
    talk = [*ASK, *_items(first), _result(first)]
    last = OpenAI().responses.create(**call, input=talk, include=include)
    return {
        "kinds": [item.type for item in first.output],
        "thoughts": thoughts,
        "content": last.output_text,
    }


def structured() -> dict[str, Any]:
    answer = OpenAI().responses.parse(**CALL, input=ASK, text_format=Sum)
    return {"total": answer.output_parsed.total}


def stopped() -> dict[str, Any]:
    answer = OpenAI().responses.create(**CALL, input=ASK, max_output_tokens=16)
    return {"status": answer.status, "reason": answer.incomplete_details.reason}


def refused() -> dict[str, Any]:
    """Errors come as the SDK's own classes, and are not tried again."""
    out = {}
    for name, fields in {
        "long": {"input": "many words " * 40000},
        "image": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]
        },
        "tool": {"input": ASK, "tools": [{"type": "local_shell"}]},
        "unknown": {"input": ASK, "extra_body": {"suffix": 1}},
        "previous": {"input": ASK, "previous_response_id": f"resp_{'0' * 32}"},
    }.items():
        try:
            OpenAI().responses.create(**CALL, **fields)
        except (BadRequestError, NotFoundError) as error:
            out[name] = error.code
    return out


def _carried_out(first: Any) -> dict[str, Any]:
    (call,) = (item for item in first.output if item.type == "function_call")
    talk = [*ASK, *first.output, _result(first)]
    last = OpenAI().responses.create(**CALL, input=talk, tools=TOOLS)
    return {"name": call.name, "arguments": call.arguments, "content": last.output_text}


def _result(answer: Any) -> dict[str, Any]:
    (call,) = (item for item in answer.output if item.type == "function_call")
    given = json.loads(call.arguments)
    total = str(given["a"] + given["b"])
    return {"type": "function_call_output", "call_id": call.call_id, "output": total}


def _items(answer: Any) -> list[dict[str, Any]]:
    """As a client keeps them that keeps JSON; `parsed_arguments` is the SDK's own."""
    dumped = [item.model_dump(exclude_none=True) for item in answer.output]
    return [{k: v for k, v in item.items() if k != "parsed_arguments"} for item in dumped]
