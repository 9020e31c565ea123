"""Conversion of arguments that a model does not write as JSON to JSON, as they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from any_agent.chat.output.json_stream import is_json, quoted
from any_agent.chat.output.message import MessageBuilder
from any_agent.types import Tool


class ArgumentsWriter:
    """Writes one call's parameters as a JSON object.

    A value that the tool declares a string is passed on as it comes; any other value once it is
    complete, as written if that is JSON, else as a string. A value that is never closed is passed
    on as far as it was written, so that truncated arguments show as such.
    """

    def __init__(self, builder: MessageBuilder, name: str, tools: Sequence[Tool]) -> None:
        self._builder = builder
        self._declared = _properties(name, tools)
        self._count = 0
        self._value: list[str] | None = None

    def begin(self, key: str) -> None:
        start = ", " if self._count else "{"
        self._count += 1
        schema = self._declared.get(key)
        self._builder.arguments(f"{start}{quoted(key)}: ")
        self._value = [] if not _is_string(schema) else None
        if self._value is None:
            self._builder.arguments('"')

    def more(self, text: str) -> None:
        """Add to the value that began last."""
        if self._value is None:
            self._builder.arguments(quoted(text)[1:-1])
        else:
            self._value.append(text)

    def end(self) -> None:
        """End the value."""
        if self._value is None:
            self._builder.arguments('"')
            return
        text = "".join(self._value)
        written = text.strip()
        self._builder.arguments(written if is_json(written) else quoted(text))

    def cut(self) -> None:
        """Write the value as it is: incomplete, and no more of it comes."""
        if self._value is not None:
            self._builder.arguments("".join(self._value).strip())

    def close(self) -> None:
        """End the call."""
        if self._count:
            self._builder.arguments("}")
        self._builder.close_call()


def _properties(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function") or {}
        parameters = function.get("parameters")
        if function.get("name") == name and isinstance(parameters, dict):
            properties = parameters.get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _is_string(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") in ("string", ["string"])
