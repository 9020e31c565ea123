"""The text of one tool-call block to a call in OpenAI's form."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from any_agent.types import Tool

ReadCall: TypeAlias = Callable[[str, Sequence[Tool]], tuple[str, str] | None]
"""A block's inner text and the request's tools to name and argument JSON; None: no call."""

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def read_json_call(block: str, _tools: Sequence[Tool] = ()) -> tuple[str, str] | None:
    """``{"name": ..., "arguments": {...}}``."""
    try:
        value = json.loads(block.strip(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return as_call(value.get("name"), value.get("arguments", {}))


def read_xml_call(block: str, tools: Sequence[Tool]) -> tuple[str, str] | None:
    """``<function=NAME><parameter=KEY>VALUE</parameter>...</function>`` (Qwen3-Coder, Qwen3.5).

    A value is its text where the tool declares a string, else its JSON if it is any.
    """
    match = _FUNCTION.fullmatch(block)
    if match is None or _PARAMETER.sub("", match[2]).strip():
        return None
    name = match[1].strip()
    declared = _properties(name, tools)
    arguments = {k: _value(text, declared.get(k)) for k, text in _PARAMETER.findall(match[2])}
    return as_call(name, arguments)


def _properties(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function") or {}
        parameters = function.get("parameters")
        if function.get("name") == name and isinstance(parameters, dict):
            properties = parameters.get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _value(text: str, schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") in ("string", ["string"]):
        return text
    try:
        return json.loads(text.strip(), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def as_call(name: Any, arguments: Any) -> tuple[str, str] | None:
    """A checked (name, argument JSON); arguments are an object, or a string that is sent as is."""
    if not isinstance(name, str) or not name or not _encodable(name):
        return None
    if isinstance(arguments, str):
        return (name, arguments) if _encodable(arguments) else None
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    # A lone surrogate (an escape that the model wrote) can only travel escaped.
    return name, text if _encodable(text) else json.dumps(arguments)


class CallIds:
    """``call_<hex>``, the same for the same prompt, place and text, whatever the chunks were."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids = prompt_ids
        self._prompt: bytes | None = None

    def make(self, index: int, text: str) -> str:
        if self._prompt is None:
            packed = np.asarray(self._prompt_ids, dtype="<i4").tobytes()
            self._prompt = hashlib.blake2b(packed, digest_size=16).digest()
        seed = self._prompt + index.to_bytes(4, "little") + text.encode(errors="surrogatepass")
        return "call_" + hashlib.blake2b(seed, digest_size=12).hexdigest()


def openai_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
