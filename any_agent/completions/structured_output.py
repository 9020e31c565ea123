"""Grammars that bind an answer to its tools or its format, for one model family.

xgrammar reads some keywords of JSON schemas without enforcing them. SGLang refuses such a schema
where it stands alone, but not as a part of a structural tag.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from any_agent.chat import ChatFormat
from any_agent.completions.params.call import ChatCall
from any_agent.completions.params.grammar import format_part
from any_agent.completions.params.schema_check import shown
from any_agent.completions.params.schema_parts import FORMATS, schemas_in
from any_agent.completions.prompt import Prompt
from any_agent.errors import UnsupportedParameter

# fmt: off
_KEYWORDS = {
    "contains", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
    "minContains", "multipleOf", "not", "then", "uniqueItems",
}
# fmt: on


def require_enforced(schema: Any, name: str) -> None:
    """Raise UnsupportedParameter, under this name, for a schema with such keywords."""
    for part in schemas_in(schema):
        ignored = sorted(_KEYWORDS & part.keys())
        text_format = part.get("format", "date")
        if not isinstance(text_format, str) or text_format not in FORMATS:
            ignored.append("format")
        if sum(map(part.__contains__, ("format", "pattern"))) + _has_length(part) > 1:
            ignored.append("format, pattern and lengths of one text")
        if ignored:
            raise UnsupportedParameter(
                f"{name} together with tools cannot have {', '.join(ignored)}, which such grammars "
                "do not enforce: leave that out of the schema, or leave out the tools",
                param=name,
            )


def _has_length(schema: dict[str, Any]) -> bool:
    return "minLength" in schema or "maxLength" in schema


_PLAIN_NAME = re.compile(r"[\w.-]+", re.ASCII)


def one_call_stops(chat: ChatFormat) -> tuple[int, ...]:
    """Return the tokens after which one call is whole; UnsupportedParameter where none says so."""
    stops = chat.one_call_stop_ids()
    if stops is None:
        raise UnsupportedParameter(
            "parallel_tool_calls=false is not supported for this model: nothing in its output "
            "says that one call is complete",
            param="parallel_tool_calls",
        )
    return stops


def forced_ids(chat: ChatFormat, prompt: Prompt, name: str) -> tuple[int, ...]:
    """Return the ids that open a call of this tool ("": any); UnsupportedParameter if unknown."""
    ids = chat.forced_call_ids(prompt.ids.tolist(), name)
    if ids is None:
        raise UnsupportedParameter(
            "a forced tool_choice is not supported for this model: how it begins a call is not "
            "known; use auto",
            param="tool_choice",
        )
    return tuple(ids)


def grammar_of_answer(chat: ChatFormat, prompt: Prompt, call: ChatCall, grammar: str) -> str:
    """Return the grammar by which an answer has the form of ``grammar`` or calls its tools.

    Reasoning that the prompt has opened is free. UnsupportedParameter where the model's family, a
    tool's name or the form prevents this; without tools, or structural tags in the engine, return
    ``grammar`` itself.
    """
    names = [tool["function"]["name"] for tool in call.callable_tools]
    if not names and not (call.structural_tag and chat.ends_in_reasoning(prompt.ids)):
        return grammar
    text = format_part(grammar)
    try:
        require_enforced(text.get("json_schema"), call.format_parameter or "response_format")
    except UnsupportedParameter:
        if names:
            raise
        # Without tools the engine enforces the schema, or refuses it.
        return grammar
    tag = chat.text_or_calls(prompt.ids, text, names)
    if tag is None and not names:
        return grammar
    odd = next((name for name in names if not _PLAIN_NAME.fullmatch(name)), None)
    if tag is None or odd is not None:
        why = "its answers do not tell a call from a text of that format"
        if tag is not None:
            why = f"the tool {shown(odd)} is called by more than letters, digits, _, . and -"
        raise UnsupportedParameter(
            f"{call.format_parameter} together with tools is not supported for this model here: "
            f"{why}; leave one of them out, or send tool_choice none or required",
            param=call.format_parameter,
        )
    return orjson.dumps({"structural_tag": tag}).decode()
