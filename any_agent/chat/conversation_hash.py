"""The identity of conversations: normal forms of messages, and running hashes.

Frameworks send messages back, but not byte for byte: keys in another order, None or missing fields,
text as parts, white space stripped from answers, arguments as another spelling of the same JSON,
ids of their own, system messages merged into one. None of that changes the conversation's meaning,
so none of it is in the normal form.

A key has three parts, which show in what two conversations differ: the running hash of the messages
after the leading system messages, the hash of those, and the hash of the tools.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import orjson

from any_agent.chat.message_validation import split_thinking, text_of
from any_agent.custom_calls import input_of, is_custom

_CHAIN, _PART = 16, 8
_BEGINNING = bytes(_CHAIN)
_NO_SYSTEM = bytes(_PART)
_CONTENT_FIELDS = ("refusal", "function_call", "audio")
"""Further fields that are part of a message's content, if they are not empty."""
_RESULT_ROLES = ("tool", "function")


def normalise(message: Any, *, nameless: Collection[str] = ()) -> dict[str, Any]:
    """Return the normal form of a message: role, content, name, calls (name and argument JSON).

    It takes any JSON value and never raises: a value without a message's shape is kept as it is. An
    answer's reasoning is left out, because most agents drop it. The call that a tool's message
    answers does not follow from that message alone; :func:`chain_keys` adds it. ``nameless``: the
    roles whose messages' names the model never sees, so that they are left out, too.
    """
    if not isinstance(message, dict):
        return {"other": message}
    role = message.get("role")
    content = message.get("content")
    text = text_of(content)
    if text is not None and role == "assistant":
        text = split_thinking(text)[1].strip()
    out: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": text if text is not None else [content],
    }
    name = message.get("name")
    # What is no text is no name: rendering refuses it.
    unseen = isinstance(name, str) and isinstance(role, str) and out["role"] in nameless
    if name is not None and not unseen:
        out["name"] = name
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        out["tool_calls"] = [_call(c) for c in calls] if isinstance(calls, list) else calls
    for field in _CONTENT_FIELDS:
        if message.get(field):
            out[field] = message[field]
    return out


def chain_keys(
    messages: Sequence[Any],
    tools: Sequence[Any] | None,
    *,
    start: bytes | None = None,
    before: Sequence[Any] = (),
    template: bytes = b"",
    nameless: Collection[str] = (),
) -> list[bytes]:
    """Return running hashes: key ``i`` identifies the tools and ``messages[:i + 1]`` (32 bytes).

    ``start`` continues from the key of the messages ``before``, which must have more than leading
    system messages: ``chain_keys(a + b, t) ==
    chain_keys(a, t) + chain_keys(b, t, start=chain_keys(a, t)[-1], before=a)``. That key covers the
    tools. ``template`` distinguishes the settings with which equal messages are rendered;
    ``nameless`` is that of :func:`normalise`.
    """
    if start is not None:
        keys: list[bytes] = []
        chain, head = start[:_CHAIN], start[_CHAIN:]
    else:
        tail = _hash(template, canonical_bytes(list(tools or [])), size=_PART)
        keys = [_BEGINNING + system + tail for system in _leading_system(messages, nameless)]
        chain, head = _BEGINNING, keys[-1][_CHAIN:] if keys else _NO_SYSTEM + tail
    numbers = _CallNumbers(before)
    for message in messages[len(keys) :]:
        normal = normalise(message, nameless=nameless)
        numbers.add_to(message, normal)
        chain = _hash(chain, canonical_bytes(normal), size=_CHAIN)
        keys.append(chain + head)
    return keys


def key_parts(key: bytes) -> tuple[bytes, bytes, bytes]:
    """Return a key's hashes: of the messages, of the leading system messages, of the tools."""
    return key[:_CHAIN], key[_CHAIN : _CHAIN + _PART], key[_CHAIN + _PART :]


def same_arguments(one: Any, other: Any) -> bool:
    """Return True if two spellings of arguments (text, or values) have the same normal form."""
    return canonical_bytes(_arguments(one)) == canonical_bytes(_arguments(other))


def is_leading_system(message: Any, *, nameless: Collection[str] = ()) -> bool:
    """Return True if the message, at the beginning, is a part of the system prompt."""
    return (
        isinstance(message, dict)
        and message.get("role") in ("system", "developer")
        and normalise(message, nameless=nameless).keys() == {"role", "content"}
        and text_of(message.get("content")) is not None
    )


def canonical_bytes(value: Any) -> bytes:
    """Return equal bytes for equal JSON values, whatever the order of keys, at any depth."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | _PLAIN)
    except TypeError:
        pass
    try:
        return b"\1" + json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError):
        return b"\0" + b"".join(_walk(value))


_PLAIN = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
"""Options that accept JSON values only, instead of writing other objects as JSON."""


class _CallNumbers:
    """Numbers the calls that tools' messages answer: frameworks change ids, but not their order."""

    def __init__(self, before: Sequence[Any]) -> None:
        self._before: Sequence[Any] | None = before
        self._ids: list[Any] = []
        self._answers = 0

    def add_to(self, message: Any, normal: dict[str, Any]) -> None:
        """Add to the next message's normal form the number of the call that it answers."""
        role = normal.get("role")
        if role in _RESULT_ROLES:
            if self._before is not None:
                self._look_back(self._before)
            normal["answers"] = self._number(message)
            self._answers += 1
        elif normal.get("tool_calls"):
            self._read_calls(message)

    def _read_calls(self, message: dict[str, Any]) -> None:
        calls = message["tool_calls"]
        calls = calls if isinstance(calls, list) else []
        self._ids = [c.get("id") if isinstance(c, dict) else None for c in calls]
        self._answers, self._before = 0, None

    def _number(self, message: dict[str, Any]) -> int:
        id = message.get("tool_call_id")
        if isinstance(id, str) and id in self._ids:
            return self._ids.index(id)
        return self._answers

    def _look_back(self, before: Sequence[Any]) -> None:
        answers = 0
        for message in reversed(before):
            if isinstance(message, dict):
                if message.get("tool_calls"):
                    self._read_calls(message)
                    break
                answers += message.get("role") in _RESULT_ROLES
        self._answers, self._before = answers, None


def _leading_system(messages: Sequence[Any], nameless: Collection[str]) -> Iterable[bytes]:
    """Yield the hash of the system prompt up to each of its messages.

    Frameworks merge them with line ends or blank lines, so blank lines do not count.
    """
    lines: list[str] = []
    for message in messages:
        if not is_leading_system(message, nameless=nameless):
            return
        text = text_of(message["content"]) or ""
        lines += [line for line in text.split("\n") if line and not line.isspace()]
        yield _hash(b"system", canonical_bytes(lines), size=_PART)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return [call]
    arguments = function.get("arguments")
    if is_custom(call) and isinstance(arguments, str):
        # The agent has the input alone, whatever the model wrote around it.
        arguments = {"input": input_of(arguments)}
    return {"name": function.get("name"), "arguments": _arguments(arguments)}


def _arguments(arguments: Any) -> Any:
    """Return argument JSON as its value; other text stays text, marked as such."""
    if isinstance(arguments, dict | list):
        arguments = _as_text(arguments)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {"value": {}}
    if not isinstance(arguments, str):
        return {"value": arguments}
    try:
        value = json.loads(arguments, parse_float=_number, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return {"text": arguments}
    return {"value": value}


def _as_text(arguments: Any) -> Any:
    """Return parsed arguments as JSON, if they can be written as such."""
    try:
        return json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return arguments


def _number(text: str) -> Any:
    """Parse a number; 1.0 becomes 1, because some languages have one kind of number only."""
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text} is not a finite number")
    return int(value) if value.is_integer() else value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _hash(before: bytes, data: bytes, *, size: int) -> bytes:
    digest = hashlib.blake2b(digest_size=size)
    digest.update(len(before).to_bytes(8, "little"))
    digest.update(before)
    digest.update(data)
    return digest.digest()


def _walk(value: Any) -> Iterable[bytes]:
    """Yield an injective encoding without recursion, for values that ``json`` refuses."""
    stack = [value]
    while stack:
        v = stack.pop()
        if isinstance(v, dict):
            yield b"{%d:" % len(v)
            for k in sorted(v, key=repr, reverse=True):
                stack += (v[k], k)
        elif isinstance(v, (list, tuple)):
            yield b"[%d:" % len(v)
            stack.extend(reversed(v))
        else:
            text = _scalar(v).encode(errors="surrogatepass")
            yield b"%s%d:" % (type(v).__name__.encode(), len(text)) + text


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value
    # An int of thousands of digits has no decimal repr.
    return hex(value) if isinstance(value, int) else repr(value)
