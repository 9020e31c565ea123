"""Converts input items to chat messages.

The several items of one answer (reasoning, text, calls) become one message again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from any_agent.completions.params.schema_check import shown
from any_agent.completions.responses.output_items import decoded
from any_agent.custom_calls import custom_call
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.types import Message

ITEM_ID = re.compile(r"(?:msg|rs|fc|ctc)_([0-9a-f]{32})_([0-9]{1,4})")
"""The id of an item of an answer: the answer's hex, and the item's place."""
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_MEDIA = {"input_image", "input_file", "input_audio", "input_video", "image_url", "image", "file"}
_KNOWN = (
    "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output, "
    "reasoning, additional_tools and item_reference"
)

Resolve = Callable[[str, str], dict[str, Any]]
"""A function from an item's id, and its place for errors, to the item; InvalidRequest, NotFound."""


def messages_of(given: Any, resolve: Resolve) -> list[Message]:
    """Return the messages of a request's ``input``.

    InvalidRequest names the item and the field that is wrong; UnsupportedParameter is for kinds of
    items that no text-only policy can take.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": _text(given, "input")}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest(
            "input must be a text, or a list of at least one item; only with a "
            "previous_response_id may it be left out",
            param="input",
        )
    turns = _Turns()
    for k, item in enumerate(given):
        _add(turns, item, f"input[{k}]", resolve)
    return turns.finish()


def _add(turns: _Turns, item: Any, where: str, resolve: Resolve) -> None:
    if not isinstance(item, dict):
        raise _wrong(where, "must be an object")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    match kind:
        case "message":
            _add_message(turns, item, where)
        case "function_call":
            turns.call(_call(item, where), item)
        case "custom_tool_call":
            turns.call(_custom_call(item, where), item)
        case "function_call_output" | "custom_tool_call_output":
            turns.other(_output(item, where))
        case "reasoning":
            turns.reasoning(_reasoning(item, where), item)
        case "additional_tools":
            # Its tools stand in the prompt with the others.
            pass
        case "item_reference":
            _add(turns, resolve(_text(item.get("id"), f"{where}.id"), where), where, resolve)
        case str():
            raise UnsupportedParameter(
                f"{where} is a {shown(kind)[1:-1]}: this service takes {_KNOWN}", param=where
            )
        case _:
            raise _wrong(where, f"must have a type: {_KNOWN} are known")


def _add_message(turns: _Turns, item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    content = _content(item.get("content"), f"{where}.content")
    if role == "assistant":
        turns.content(content, item)
    else:
        turns.other({"role": "user" if role == "user" else "system", "content": content})


def _content(content: Any, where: str) -> str:
    """Return a text, or text parts, as one text."""
    if isinstance(content, str):
        return _text(content, where)
    if not isinstance(content, list):
        raise _wrong(where, "must be a text or a list of text parts")
    return "".join([_part(part, f"{where}[{k}]") for k, part in enumerate(content)])


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise _wrong(where, 'must be {"type": "input_text", "text": ...}')
    if kind in _MEDIA:
        raise _wrong(where, f"is {kind}: this model reads text only")
    field = _TEXTS.get(kind)
    if field is None:
        raise _wrong(where, "must be an input_text, an output_text or a refusal")
    return _text(part.get(field), f"{where}.{field}")


def _call(item: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = item.get("arguments")
    return {
        "id": _text(item.get("call_id"), f"{where}.call_id"),
        "type": "function",
        "function": {
            "name": _name(item, where),
            "arguments": _text("{}" if arguments is None else arguments, f"{where}.arguments"),
        },
    }


def _custom_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    id = _text(item.get("call_id"), f"{where}.call_id")
    return custom_call(id, _name(item, where), _text(item.get("input"), f"{where}.input"))


def _name(item: dict[str, Any], where: str) -> str:
    group = item.get("namespace")
    if group is not None:
        group = _text(group, f"{where}.namespace")
    return full_name(group, _text(item.get("name"), f"{where}.name"))


def full_name(group: str | None, name: str) -> str:
    """Return the name by which the model calls a function of a group, or of none."""
    return f"{group}__{name}" if group else name


def _output(item: dict[str, Any], where: str) -> Message:
    return {
        "role": "tool",
        "tool_call_id": _text(item.get("call_id"), f"{where}.call_id"),
        "content": _content(item.get("output"), f"{where}.output"),
    }


def _reasoning(item: dict[str, Any], where: str) -> str:
    """Return an item's text; else the reasoning of our own opaque text; else its summary."""
    for field, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        if text := _reasoning_text(item.get(field), kind, f"{where}.{field}"):
            return text
        hidden = item.get("encrypted_content")
        if field == "content" and hidden is not None:
            known = decoded(_text(hidden, f"{where}.encrypted_content"))
            if known is not None:
                return known
    return ""


def _reasoning_text(parts: Any, kind: str, where: str) -> str:
    if parts is None:
        return ""
    if not isinstance(parts, list):
        raise _wrong(where, "must be a list")
    texts = []
    for k, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") not in (kind, "text"):
            raise _wrong(f"{where}[{k}]", f'must be {{"type": "{kind}", "text": ...}}')
        texts.append(_text(part.get("text"), f"{where}[{k}].text"))
    return "".join(texts)


class _Turns:
    """Builds messages; consecutive items of the assistant may be one message or several."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._open: Message | None = None
        """The assistant's message that later items may belong to."""
        self._texts: dict[str, list[str]] = {}
        """The open message's texts by field, in pieces, of which there may be thousands."""
        self._of: str | None = None
        """The answer that the open message comes from, if the ids of its items show it."""

    def finish(self) -> list[Message]:
        """Return all messages, when nothing follows."""
        self._end()
        return self._messages

    def other(self, message: Message) -> None:
        self._end()
        self._messages.append(message)

    def reasoning(self, text: str, item: dict[str, Any]) -> None:
        self._message(item, new="content" in self._texts or self._called())
        if text:
            self._texts.setdefault("reasoning_content", []).append(text)

    def content(self, text: str, item: dict[str, Any]) -> None:
        # Text after a call belongs to the same answer; two texts in a row are two.
        self._message(item, new="content" in self._texts and not self._called())
        self._texts.setdefault("content", []).append(text)

    def call(self, call: dict[str, Any], item: dict[str, Any]) -> None:
        self._message(item, new=False).setdefault("tool_calls", []).append(call)

    def _called(self) -> bool:
        return self._open is not None and "tool_calls" in self._open

    def _end(self) -> None:
        """Complete the open message."""
        if self._open is not None:
            self._open.update({field: "".join(texts) for field, texts in self._texts.items()})
        self._open = None
        self._texts = {}

    def _message(self, item: dict[str, Any], *, new: bool) -> Message:
        """Return the item's message: a new one if ``new``, unless the ids show otherwise."""
        id = item.get("id")
        match = ITEM_ID.fullmatch(id) if isinstance(id, str) else None
        of = match[1] if match else None
        if of is not None and self._of is not None and self._open is not None:
            new = of != self._of
        if new or self._open is None:
            self._end()
            self._open = {"role": "assistant", "content": None}
            self._of = None
            self._messages.append(self._open)
        self._of = self._of or of
        return self._open


def require_few(items: Sequence[Any], longest: int) -> None:
    """Raise InvalidRequest for more items than a context has tokens: each is a token at least."""
    if len(items) > longest:
        raise InvalidRequest(
            f"input has {len(items)} items, and this model's context holds {longest} tokens; send "
            "fewer",
            code="context_length_exceeded",
            param="input",
        )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(where, "has a lone surrogate: send valid Unicode") from None
    return value


def _wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where} {what}", param=where)
