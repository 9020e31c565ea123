"""Anthropic's `system` and `messages` as chat messages.

An assistant's turn becomes one message, even if it comes in several. A user's turn becomes a tool
message for each result, and a user message for its text. A `tool_reference` in a result becomes the
definition of that tool.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NoReturn

import orjson

from any_agent.completions.messages.tool_use import arguments_of, call_id
from any_agent.completions.params.parameter import MAX_TOOLS_BYTES
from any_agent.completions.params.schema_check import shown
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import Message, Tool

_BILLING = "x-anthropic-billing-header:"
"""The line that Claude Code puts into its system prompt, another one in each request."""
_PREFILL = (
    "messages ends with an assistant's message, and answers are not prefilled here: end it with a "
    "user's message"
)
_UNREADABLE = {
    "image": "this model reads text only",
    "document": "this model reads text only: put it into a text block",
    "search_result": "this model reads text only: put it into a text block",
    "container_upload": "there are no containers here",
}
MAX_SHOWN_BYTES = 4 * MAX_TOOLS_BYTES
"""Bytes of definitions that a request may show: a long conversation refers to a tool repeatedly."""


class Definitions:
    """The definitions of a request's tools, as results show them."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self.shown: dict[str, bytes] = {}
        """The JSON of the tools that are shown, by name."""
        self._tools = tools
        self._left = MAX_SHOWN_BYTES

    def line(self, reference: dict[str, Any], where: str) -> str:
        """Return the line that shows a tool to the model, always the same for the same tool.

        InvalidRequest for an unknown tool, and beyond :data:`MAX_SHOWN_BYTES`.
        """
        name = reference.get("tool_name")
        if not isinstance(name, str) or name not in self._tools:
            _wrong(f"{where}.tool_name", f"is {shown(name)}, and no such tool is in tools")
        if name not in self.shown:
            self.shown[name] = orjson.dumps(self._tools[name]["function"])
        self._left -= len(self.shown[name])
        if self._left < 0:
            _wrong(
                where,
                f"is a reference too many: definitions of {MAX_SHOWN_BYTES >> 20} MiB may be "
                "shown, so refer to each tool once, or to fewer",
            )
        return f"<function>{self.shown[name].decode()}</function>"


def conversation_of(system: Any, messages: list[Any], tools: Definitions) -> list[Message]:
    """Return the chat messages; ``tools``: those that results may refer to.

    InvalidRequest or UnsupportedParameter names what is wrong.
    """
    out: list[Message] = []
    if system is not None:
        text = _system_text(system)
        if text:
            out.append({"role": "system", "content": text})
    turn: _AssistantTurn | None = None
    for i, message in enumerate(messages):
        if type(message) is not dict:
            _wrong(f"messages[{i}]", "must be an object")
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            if turn is None:
                turn = _AssistantTurn()
            turn.add(content, i)
            continue
        if turn is not None:
            out.append(turn.message())
            turn = None
        if role == "user":
            if type(content) is str:
                out.append({"role": "user", "content": content})
            else:
                _user_turn(out, content, i, tools)
        elif role == "system":
            out.append({"role": "system", "content": _text(content, f"messages[{i}].content")})
        else:
            _wrong(f"messages[{i}].role", "must be user, assistant or system")
    if turn is not None:
        raise InvalidRequest(_PREFILL, param="messages")
    return out


def _system_text(system: Any) -> str:
    if isinstance(system, str):
        return _without_billing(system)
    if not isinstance(system, list):
        raise InvalidRequest("system must be a string or a list of text blocks", param="system")
    texts = [_text_block(block, f"system[{k}]") for k, block in enumerate(system)]
    return "".join(map(_without_billing, texts))


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _wrong(where, "must be a string or a list of content blocks")
    return "".join([_text_block(block, f"{where}[{k}]") for k, block in enumerate(content)])


def _text_block(block: Any, where: str) -> str:
    text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
    if not isinstance(text, str):
        _refuse(block, where, 'must be {"type": "text", "text": ...}')
    return text


def _user_turn(out: list[Message], content: Any, i: int, tools: Definitions) -> None:
    if not isinstance(content, list):
        _wrong(f"messages[{i}].content", "must be a string or a list of content blocks")
    texts: list[str] = []
    for k, block in enumerate(content):
        kind = block.get("type") if type(block) is dict else None
        if kind == "text" and type(block.get("text")) is str:
            texts.append(block["text"])
        elif kind == "tool_result":
            out.append(_result(block, f"messages[{i}].content[{k}]", tools))
        else:
            where = f"messages[{i}].content[{k}]"
            _refuse(block, where, 'must be a "text" or "tool_result" block')
    if texts or not content:
        out.append({"role": "user", "content": "".join(texts)})


def _result(block: dict[str, Any], where: str, tools: Definitions) -> Message:
    id = block.get("tool_use_id")
    if not isinstance(id, str) or not id:
        _wrong(f"{where}.tool_use_id", "must be a non-empty string")
    content = block.get("content")
    text = "" if content is None else _result_text(content, f"{where}.tool_result.content", tools)
    failed = block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        _wrong(f"{where}.is_error", "must be true or false")
    if failed and "error" not in text.lower():
        # Chat templates have no other place for the failure.
        text = f"Error: {text}" if text else "Error"
    return {"role": "tool", "tool_call_id": call_id(id), "content": text}


def _result_text(content: Any, where: str, tools: Definitions) -> str:
    if not isinstance(content, list):
        return _text(content, where)
    parts: list[str] = []
    for is_reference, blocks in groupby(enumerate(content), lambda each: _is_reference(each[1])):
        named = [(block, f"{where}[{k}]") for k, block in blocks]
        if is_reference:
            lines = [tools.line(block, place) for block, place in named]
            parts.append("\n".join(["<functions>", *lines, "</functions>"]))
        else:
            parts += [_text_block(block, place) for block, place in named]
    return "".join(parts)


def _is_reference(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_reference"


class _AssistantTurn:
    """An assistant's turn, which some clients send as one message for each block."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def add(self, content: Any, i: int) -> None:
        if isinstance(content, str):
            self._texts.append(content)
            return
        if not isinstance(content, list):
            _wrong(f"messages[{i}].content", "must be a string or a list of content blocks")
        for k, block in enumerate(content):
            kind = block.get("type") if type(block) is dict else None
            if kind == "text" and type(block.get("text")) is str:
                self._texts.append(block["text"])
            elif kind == "tool_use":
                self._calls.append(_call(block, f"messages[{i}].content[{k}]"))
            elif kind == "thinking" and type(block.get("thinking")) is str:
                self._thoughts.append(block["thinking"])
            elif kind != "redacted_thinking":
                where = f"messages[{i}].content[{k}]"
                _refuse(block, where, 'must be a "text", "tool_use" or "thinking" block')

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": "".join(self._texts)}
        if any(self._thoughts):
            message["reasoning_content"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    id, name, given = block.get("id"), block.get("name"), block.get("input")
    if not isinstance(id, str) or not id:
        _wrong(f"{where}.id", "must be a non-empty string")
    if not isinstance(name, str) or not name:
        _wrong(f"{where}.name", "must be a non-empty string")
    if type(given) is not dict:
        _wrong(f"{where}.input", "must be an object")
    function = {"name": name, "arguments": arguments_of(given)}
    return {"id": call_id(id), "type": "function", "function": function}


def _refuse(block: Any, where: str, wanted: str) -> NoReturn:
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind in _UNREADABLE:
        # In the form of Anthropic's errors: Claude Code reads the place, and goes on without it.
        raise InvalidRequest(f"{where}.{kind}: {_UNREADABLE[kind]}", param=_param(where))
    if isinstance(kind, str) and kind not in ("text", "thinking", "tool_use", "tool_result"):
        message = f"{where} is a block of type {shown(kind)}, which is not supported here"
        raise UnsupportedParameter(message, param=_param(where))
    _wrong(where, wanted)


def _wrong(where: str, what: str) -> NoReturn:
    raise InvalidRequest(f"{where} {what}", param=_param(where))


def _param(where: str) -> str:
    """Return a place's path in the body; a result's has its kind, too, in Anthropic's errors."""
    return where.replace(".tool_result", "")
