"""Validation of an agent's messages and tools, and their conversion to the renderers' form."""

from __future__ import annotations

import re
from typing import Any

from any_agent.errors import InvalidRequest, TemplateError
from any_agent.types import Message, Tool

_ROLES = {"system", "developer", "user", "assistant", "tool"}
_MEDIA = {"image_url", "image", "input_image", "input_audio", "audio", "video", "video_url", "file"}


def validate_messages(messages: Any) -> list[Message]:
    """Return the messages in the renderers' form: string contents, no developer role, known fields.

    Raises:
        InvalidRequest: names the index and the field that is wrong.
        TemplateError: a text has lone surrogates, which no tokenizer takes.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    return [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]


def validate_tools(tools: Any) -> list[Tool] | None:
    """Return the tools as they are, None for none.

    Raises:
        InvalidRequest: names the index and the field that is wrong.
    """
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise InvalidRequest("tools must be a list", param="tools")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise _wrong(f"tools[{i}].function", "must be an object")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise _wrong(f"tools[{i}].function.name", "must be a string")
    return tools


def text_of(content: Any) -> str | None:
    """Return plain text or a list of text parts as one string; None for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return None
    texts = [_part_text(part) for part in content]
    if any(t is None for t in texts):
        return None
    return "".join(t for t in texts if t is not None)


def _part_text(part: Any) -> str | None:
    if not isinstance(part, dict):
        return None
    key = {"text": "text", "refusal": "refusal"}.get(str(part.get("type")))
    text = part.get(key) if key else None
    return text if isinstance(text, str) else None


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise _wrong(where, "must be an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(sorted(_ROLES))}")
    out: Message = {
        "role": "system" if role == "developer" else role,
        "content": _content(message, f"{where}.content"),
    }
    for key in ("name", "tool_call_id"):
        value = message.get(key)
        if value is not None:
            out[key] = _text(value, f"{where}.{key}")
    if role == "assistant":
        if message.get("reasoning_content") is not None:
            out["reasoning_content"] = _text(
                message["reasoning_content"], f"{where}.reasoning_content"
            )
        if message.get("tool_calls"):
            out["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return out


def _content(message: Message, where: str) -> str:
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise _wrong(where, "must be a string or a list of text parts")
    for i, part in enumerate(content if isinstance(content, list) else []):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _MEDIA:
            raise _wrong(f"{where}[{i}]", f"is {kind}: this model reads text only")
        if _part_text(part) is None:
            raise _wrong(f"{where}[{i}]", 'must be {"type": "text", "text": ...}')
    text = text_of(content)
    if text is None:
        raise _wrong(where, "must be a string or a list of text parts")
    return _text(text, where)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(where, "must be a list")
    out = []
    for i, call in enumerate(calls):
        at = f"{where}[{i}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise _wrong(at, "must be an object")
        arguments = function.get("arguments")
        if arguments is None:
            arguments = "{}"
        if not isinstance(arguments, dict):
            arguments = _text(arguments, f"{at}.arguments")
        clean: dict[str, Any] = {
            "type": "function",
            "function": {"name": _text(function.get("name"), f"{at}.name"), "arguments": arguments},
        }
        if call.get("id") is not None:
            clean["id"] = _text(call["id"], f"{where}[{i}].id")
        out.append(clean)
    return out


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise TemplateError(
            f"{where} has a lone surrogate at character {e.start}: send valid Unicode", param=where
        ) from None
    return value


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}", param=where)


_FIELDS = ("reasoning_content", "reasoning")
_THINKING = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


def split_thinking(text: str) -> tuple[str, str]:
    """Split a content into its leading reasoning (`<think>...</think>`) and the rest."""
    match = _THINKING.match(text)
    return (match[1], text[match.end() :]) if match is not None else ("", text)


def reasoning_of(message: Any) -> str:
    """Return a message's reasoning without white space around it, "" for none."""
    if not isinstance(message, dict):
        return ""
    for field in _FIELDS:
        value = message.get(field)
        if isinstance(value, str) and value.strip():
            return value.strip()
    return split_thinking(text_of(message.get("content")) or "")[0].strip()
