"""When two message lists are the same conversation: normal forms and running hashes.

Frameworks send back what they were sent, but not byte for byte: keys in another order, None or
missing fields, text as parts, arguments as another spelling of the same JSON, ids of their own.
None of that changes what the conversation says, so none of it is in the normal form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from any_agent.chat.messages import text_of

_DIGEST = 16


def normalise(message: Any) -> dict[str, Any]:
    """The normal form of one message: role, content, name, calls (name and argument JSON).

    Takes any JSON value and never raises: what has no chat message's shape is kept as it is.
    ``reasoning_content`` is left out, because most agents drop it.
    """
    if not isinstance(message, dict):
        return {"other": message}
    role = message.get("role")
    content = message.get("content")
    text = text_of(content)
    out: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": text if text is not None else [content],
    }
    if message.get("name") is not None:
        out["name"] = message["name"]
    if message.get("tool_calls"):
        calls = message["tool_calls"]
        out["tool_calls"] = [_call(c) for c in calls] if isinstance(calls, list) else calls
    return out


def chain_keys(
    messages: Sequence[Any], tools: Sequence[Any] | None, *, start: bytes | None = None
) -> list[bytes]:
    """Running hashes: key ``i`` stands for the tools and ``messages[:i + 1]`` (16 bytes each).

    ``start`` continues from the key of what came before (and already stands for the tools):
    ``chain_keys(a + b, t) == chain_keys(a, t) + chain_keys(b, t, start=chain_keys(a, t)[-1])``.
    """
    key = start if start is not None else _hash(b"tools", canonical_bytes(list(tools or [])))
    keys = []
    for message in messages:
        key = _hash(key, canonical_bytes(normalise(message)))
        keys.append(key)
    return keys


def canonical_bytes(value: Any) -> bytes:
    """Equal bytes for equal JSON values, whatever the order of keys; takes any depth."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError):
        return b"\0" + b"".join(_walk(value))


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return [call]
    return {"name": function.get("name"), "arguments": _arguments(function.get("arguments"))}


def _arguments(arguments: Any) -> Any:
    """Argument JSON as its value; what is not JSON stays text, marked so."""
    if not isinstance(arguments, str):
        return {"value": arguments if arguments is not None else {}}
    try:
        return {"value": json.loads(arguments)}
    except (ValueError, RecursionError):
        return {"text": arguments}


def _hash(before: bytes, data: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST)
    digest.update(len(before).to_bytes(8, "little"))
    digest.update(before)
    digest.update(data)
    return digest.digest()


def _walk(value: Any) -> Iterable[bytes]:
    """An injective encoding without recursion, for what ``json`` gives up on."""
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
