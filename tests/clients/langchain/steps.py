"""What an agent does with LangChain, over each API that it has a chat model for."""

from __future__ import annotations

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

ASK = HumanMessage("What is 2 and 3?")


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Sum(BaseModel):
    """A sum."""

    total: int


def model(api: str, **more: Any) -> ChatOpenAI | ChatAnthropic:
    if api == "messages":
        return ChatAnthropic(model="claude-sonnet-4-5", max_tokens=256, **more)
    return ChatOpenAI(model="gpt-4o", use_responses_api=api == "responses", **more)


def plain(api: str) -> dict[str, Any]:
    answer = model(api).invoke([ASK])
    usage = answer.usage_metadata
    return {
        "content": answer.text,
        "adds up": usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0,
    }


def stream(api: str) -> dict[str, Any]:
    """The parts, and what LangChain's own addition makes of them."""
    usage = {"stream_usage": True} if api == "chat" else {}
    parts = list(model(api, **usage).stream([ASK]))
    whole = _sum(parts)
    return {
        "content": whole.text,
        "streamed": "".join(part.text for part in parts),
        "output_tokens": whole.usage_metadata["output_tokens"],
    }


def three_turns(api: str) -> dict[str, Any]:
    chat = model(api)
    messages: list[BaseMessage] = []
    for text in (ASK.content, "And 1?", "And 2?"):
        messages.append(HumanMessage(text))
        messages.append(chat.invoke(messages))
    return {"said": [m.text for m in messages if m.type == "ai"]}


def tools(api: str) -> dict[str, Any]:
    chat = model(api).bind_tools([add])
    first = chat.invoke([ASK])
    return _carried_out(chat, first)


def tools_streamed(api: str) -> dict[str, Any]:
    chat = model(api).bind_tools([add])
    return _carried_out(chat, _sum(list(chat.stream([ASK]))))


def _carried_out(chat: Any, first: Any) -> dict[str, Any]:
    (call,) = first.tool_calls
    result: ToolMessage = add.invoke(call)
    last = chat.invoke([ASK, first, result])
    return {"name": call["name"], "result": result.content, "content": last.text}


def structured(api: str) -> dict[str, Any]:
    chat = model(api).with_structured_output(Sum, method="json_schema")
    return {"total": chat.invoke([ASK]).total}


def previous() -> dict[str, Any]:
    """Three turns, of which each sends only what is new."""
    chat = model("responses", use_previous_response_id=True)
    messages: list[BaseMessage] = []
    for text in (ASK.content, "And 1?", "And 2?"):
        messages.append(HumanMessage(text))
        messages.append(chat.invoke(messages))
    return {"said": [m.text for m in messages if m.type == "ai"]}


def refused(api: str) -> dict[str, Any]:
    more: dict[str, Any] = {"extra_body": {"suffix": 1}}
    if api == "messages":
        more = {"model_kwargs": more}
    try:
        model(api, **more).invoke([ASK])
    except Exception as error:
        bad = "BadRequestError" in [kind.__name__ for kind in type(error).__mro__]
        return {"bad": bad, "named": "suffix" in str(error)}
    return {}


def _sum(parts: list[AIMessageChunk]) -> AIMessageChunk:
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    return whole
