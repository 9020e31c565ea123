"""What an agent does with OpenAI's SDK, any version of it; runs in an environment that has it."""

from __future__ import annotations

import json
from typing import Any

from openai import BadRequestError, OpenAI

MODEL = "gpt-4o"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 and 3?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            },
        },
    }
]


def plain() -> dict[str, Any]:
    raw = OpenAI().chat.completions.with_raw_response.create(model=MODEL, messages=ASK)
    answer = raw.parse()
    choice, usage = answer.choices[0], answer.usage
    return {
        "content": choice.message.content,
        "finish": choice.finish_reason,
        "adds up": usage.total_tokens == usage.prompt_tokens + usage.completion_tokens,
        "same id": raw.headers["x-any-agent-interaction"] == answer.id,
    }


def stream() -> dict[str, Any]:
    chunks = OpenAI().chat.completions.create(
        model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    text, finish, usage = "", None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return {"content": text, "finish": finish, "completion_tokens": usage.completion_tokens}


def helper() -> dict[str, Any]:
    """The SDK's own accumulation of a stream, which is to equal the whole answer."""
    with OpenAI().chat.completions.stream(model=MODEL, messages=ASK, tools=TOOLS) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    message = final.choices[0].message
    return {
        "in parts": "tool_calls.function.arguments.delta" in kinds,
        "content": message.content,
        "finish": final.choices[0].finish_reason,
        "calls": [[c.function.name, c.function.arguments] for c in message.tool_calls or []],
    }


def three_turns() -> dict[str, Any]:
    messages = list(ASK)
    for number in range(3):
        answer = OpenAI().chat.completions.create(model=MODEL, messages=messages)
        messages += [
            answer.choices[0].message.model_dump(exclude_none=number == 1),
            {"role": "user", "content": f"And {number}?"},
        ]
    return {"said": [m["content"] for m in messages if m["role"] == "assistant"]}


def tools() -> dict[str, Any]:
    """A round trip: the call is carried out, its result goes back."""
    messages = list(ASK)
    first = OpenAI().chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    message = first.choices[0].message
    call = message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    total = str(arguments["a"] + arguments["b"])
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": total}]
    last = OpenAI().chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
    return {
        "finish": first.choices[0].finish_reason,
        "name": call.function.name,
        "result": total,
        "content": last.choices[0].message.content,
    }


def tools_streamed() -> dict[str, Any]:
    chunks = OpenAI().chat.completions.create(model=MODEL, messages=ASK, tools=TOOLS, stream=True)
    calls: dict[int, dict[str, Any]] = {}
    parts, finish = 0, None
    for chunk in chunks:
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or []:
            call = calls.setdefault(delta.index, {"id": delta.id, "name": "", "arguments": ""})
            call["name"] += delta.function.name or ""
            call["arguments"] += delta.function.arguments or ""
            parts += 1
    made = [[call["name"], call["arguments"]] for call in calls.values()]
    ids = all(call["id"].startswith("call_") for call in calls.values())
    return {"finish": finish, "in parts": parts > 3, "calls": made, "ids": ids}


def choices() -> dict[str, Any]:
    answer = OpenAI().chat.completions.create(
        model=MODEL, messages=ASK, n=2, logprobs=True, top_logprobs=2
    )
    return {
        "indices": [choice.index for choice in answer.choices],
        "said": sorted(choice.message.content for choice in answer.choices),
        "adds up": sum(len(choice.logprobs.content) for choice in answer.choices)
        == answer.usage.completion_tokens,
        "top": [len(choice.logprobs.content[0].top_logprobs) for choice in answer.choices],
    }


def legacy() -> dict[str, Any]:
    answer = OpenAI().completions.create(model=MODEL, prompt="2 and 3 is", max_tokens=8, logprobs=1)
    streamed = OpenAI().completions.create(model=MODEL, prompt="2 and 3 is", stream=True)
    return {
        "text": answer.choices[0].text,
        "tokens": len(answer.choices[0].logprobs.token_logprobs),
        "streamed": "".join(chunk.choices[0].text for chunk in streamed),
    }


def refused() -> dict[str, Any]:
    """Errors come as the SDK's own classes, and are not tried again."""
    out = {}
    for name, fields in {
        "long": {"messages": [{"role": "user", "content": "many words " * 40000}]},
        "image": {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:,"}}],
                }
            ]
        },
        "unknown": {"messages": ASK, "extra_body": {"suffix": 1}},
    }.items():
        try:
            OpenAI().chat.completions.create(model=MODEL, **fields)
        except BadRequestError as error:
            out[name] = error.code
    return out
