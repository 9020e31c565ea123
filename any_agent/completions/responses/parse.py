"""Checks a `/v1/responses` body by the table of parameters.

Tools are flat there; the call has them in the form of chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from any_agent.completions.params.call import ChatCall, ParseSettings
from any_agent.completions.params.grammar import grammar_text, schema_grammar, unless_forced
from any_agent.completions.params.parameter import MAX_NOTE_BYTES, MAX_TOOLS
from any_agent.completions.params.parse import call_of, sort_parameters
from any_agent.completions.params.schema_check import (
    check,
    json_text,
    require_names,
    require_object,
    shown,
)
from any_agent.completions.params.table import TABLE
from any_agent.completions.params.table_responses import MAX_FORMAT_NAME
from any_agent.completions.params.tools import tool_list, tools_of
from any_agent.completions.responses.history import (
    ID_PREFIX,
    ItemHistory,
    full_lines,
    messages_before,
)
from any_agent.completions.responses.input_items import messages_of, require_few
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.record import InteractionTree
from any_agent.types import Message, Tool

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_FORMAT_NAME = {"type": "string", "minLength": 1, "maxLength": MAX_FORMAT_NAME}
_VERBOSITIES = {"enum": ["low", "medium", "high"]}
_SUMMARIES = {"enum": ["auto", "concise", "detailed"]}


DEFAULTS: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "user": None,
}
"""The request fields that an answer repeats, with their values where the request has none."""


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """A checked request, and the parts of it that only its answer needs."""

    chat: ChatCall
    """The same request as a chat call."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """The request's fields that the answer repeats, where they differ from :data:`DEFAULTS`."""
    encrypted: bool = False
    """True if reasoning is added once more, as an opaque text that brings it back."""


def parse_responses(
    body: Any,
    settings: ParseSettings,
    tree: InteractionTree | None = None,
    *,
    context_length: int = 1 << 31,
) -> ResponsesCall:
    """Check a `/responses` body.

    ``tree``: the session's, in which earlier answers are looked up. Raises InvalidRequest,
    UnsupportedParameter or NotFound, naming the parameter.
    """
    body, recorded, rest = sort_parameters(
        body, TABLE["responses"], settings.known_settings, settings.unknown
    )
    include = _include(body.get("include"))
    tools, shown_tools, forced, choice = chat_tools_of(body)
    grammar, text = _text(body.get("text"))
    grammar, asked_by = unless_forced(grammar, "text.format", forced, rest)
    effort, reasoning = _reasoning(body.get("reasoning"))
    _check_stream_options(body.get("stream_options"))
    messages, before = _messages(body, tree, context_length)
    logprobs = _LOGPROBS in include
    call = call_of(body, recorded, rest, settings, grammar=grammar, effort=effort)
    repeated = _repeated(
        body, text=text, reasoning=reasoning, tools=flat(tools), tool_choice=choice
    )
    elsewhere = set(recorded)
    if flat(shown_tools) == repeated.get("tools", []):
        elsewhere.add("tools")
    kept = {name: value for name, value in repeated.items() if name not in elsewhere}
    if kept.get("instructions"):
        # The instructions are recorded as the first messages' lines, so their number is enough.
        kept["instructions"] = full_lines(kept["instructions"])
    chat = replace(
        call,
        messages=messages,
        tools=shown_tools,
        logprobs=logprobs,
        top_logprobs=(body.get("top_logprobs") or 0) if logprobs else 0,
        forced_call=forced,
        format_parameter=asked_by if grammar is not None else None,
        id_prefix=ID_PREFIX,
        prompt_parameter="input",
        goes_on_from=before,
        kept={"responses": kept | _included(logprobs, _ENCRYPTED in include)},
    )
    return ResponsesCall(chat, repeated, _ENCRYPTED in include)


def _messages(
    body: Mapping[str, Any], tree: InteractionTree | None, context_length: int
) -> tuple[list[Message], str | None]:
    """Return the conversation, and the id of the answer that the request continues."""
    given = body.get("input")
    if isinstance(given, list):
        require_few(given, context_length)
    messages: list[Message] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    before = body.get("previous_response_id")
    if before is not None:
        messages += messages_before(before, tree)
        if not given and given in (None, [], ""):
            # The agent lets the model go on, as after an answer that its limit cut off.
            return messages, before
    return messages + messages_of(given, ItemHistory(tree)), before


def _include(value: Any) -> set[str]:
    if value is None:
        return set()
    row = TABLE["responses"]["include"]
    if isinstance(value, list):
        for each in value:
            if each not in row.schema["items"]["enum"]:
                raise UnsupportedParameter(
                    f"include: {shown(each)} is unknown: leave it out", param="include"
                )
    check(value, row.schema, "include")
    return set(value)


def _included(logprobs: bool, encrypted: bool) -> dict[str, bool]:
    return ({"logprobs": True} if logprobs else {}) | ({"encrypted": True} if encrypted else {})


def _text(value: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the grammar, and the `text` that the answer repeats."""
    if value is None:
        return None, dict(DEFAULTS["text"])
    given = require_object(value, "text")
    require_names(given, "text", ("format", "verbosity"))
    repeated = dict(DEFAULTS["text"])
    if given.get("verbosity") is not None:
        check(given["verbosity"], _VERBOSITIES, "text.verbosity")
        repeated["verbosity"] = given["verbosity"]
    wanted = given.get("format")
    if wanted is None:
        return None, repeated
    grammar = _grammar(require_object(wanted, "text.format"))
    if grammar is not None:
        repeated["format"] = wanted
    return grammar, repeated


def _grammar(wanted: Mapping[str, Any]) -> str | None:
    name = "text.format"
    match wanted.get("type"):
        case "text":
            return None
        case "json_object":
            require_names(wanted, name, ("type",))
            return grammar_text({"json_object": True}, name)
        case "json_schema":
            require_names(wanted, name, ("type", "name", "schema", "strict", "description"))
            check(wanted.get("name"), _FORMAT_NAME, f"{name}.name")
            for part, kind in (("strict", "boolean"), ("description", "string")):
                if wanted.get(part) is not None:
                    check(wanted[part], {"type": kind}, f"{name}.{part}")
            json_text(wanted.get("description"), f"{name}.description", longest=MAX_NOTE_BYTES)
            return schema_grammar(wanted.get("schema"), name, strict=wanted.get("strict") is True)
        case str(kind):
            raise UnsupportedParameter(
                f"{name} must be text, json_object or json_schema, and is {shown(kind)}", param=name
            )
    raise InvalidRequest(f"{name} must have a type", param=name)


def _reasoning(value: Any) -> tuple[str | None, dict[str, Any]]:
    """Return the effort, and the `reasoning` that the answer repeats."""
    repeated = dict(DEFAULTS["reasoning"])
    if value is None:
        return None, repeated
    given = require_object(value, "reasoning")
    require_names(given, "reasoning", ("effort", "summary", "generate_summary", "context", "mode"))
    for name, schema in (
        ("effort", TABLE["chat"]["reasoning_effort"].schema),
        ("summary", _SUMMARIES),
        ("generate_summary", _SUMMARIES),
    ):
        if given.get(name) is not None:
            check(given[name], schema, f"reasoning.{name}")
    for name, neutral in (("context", "auto"), ("mode", "standard")):
        if given.get(name) not in (None, neutral):
            raise UnsupportedParameter(
                f"reasoning.{name} is not supported here: leave it out", param="reasoning"
            )
    repeated["effort"] = given.get("effort")
    repeated["summary"] = given.get("summary") or given.get("generate_summary")
    return given.get("effort"), repeated


def _check_stream_options(value: Any) -> None:
    if value is None:
        return
    given = require_object(value, "stream_options")
    require_names(given, "stream_options", ("include_obfuscation",))
    if given.get("include_obfuscation") is not None:
        name = "stream_options.include_obfuscation"
        check(given["include_obfuscation"], {"type": "boolean"}, name)


def _repeated(body: Mapping[str, Any], **checked: Any) -> dict[str, Any]:
    """Return the fields to repeat; ``checked`` replaces objects and lists by checked ones."""
    given = {name: body[name] for name in DEFAULTS if body.get(name) is not None}
    given |= {name: value for name, value in checked.items() if value is not None}
    return {name: value for name, value in given.items() if value != DEFAULTS[name]}


_FIELDS: dict[str, tuple[type, str]] = {
    "description": (str, "a string"),
    "parameters": (dict, "an object"),
    "strict": (bool, "true or false"),
}


def chat_tools_of(
    body: Mapping[str, Any],
) -> tuple[list[Tool], list[Tool] | None, str | None, Any]:
    """Return all tools in a chat call's form, those to render, the one that must be called, and
    the choice of them as an answer repeats it."""
    chat = [_nested(tool, f"tools[{k}]") for k, tool in enumerate(tool_list(body.get("tools")))]
    choice = _choice(body.get("tool_choice"))
    shown_tools, forced = tools_of({"tools": chat, "tool_choice": choice})
    return chat, shown_tools, forced, _flat_choice(choice)


def flat(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Return tools as an answer repeats them."""
    functions = [tool["function"] for tool in tools or ()]
    return [
        {"type": "function", "name": f["name"], **{part: f.get(part) for part in _FIELDS}}
        for f in functions
    ]


def _nested(tool: Any, where: str) -> Tool:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{where} must be an object", param="tools")
    kind = tool.get("type")
    if kind != "function":
        if not isinstance(kind, str):
            raise InvalidRequest(f'{where} must have the type "function"', param="tools")
        raise UnsupportedParameter(
            f"{where} is {shown(kind)}: only functions are supported; give the model a function "
            "that does the same",
            param="tools",
        )
    if tool.get("defer_loading"):
        raise UnsupportedParameter(
            f"{where}.defer_loading is not supported: the prompt shows every tool",
            param="tools",
        )
    name = tool.get("name")
    if not isinstance(name, str):
        raise InvalidRequest(
            f'{where} must be {{"type": "function", "name": ..., "parameters": ...}}', param="tools"
        )
    given = {part: tool[part] for part in _FIELDS if tool.get(part) is not None}
    for part, value in given.items():
        wanted, what = _FIELDS[part]
        if not isinstance(value, wanted):
            raise InvalidRequest(f"{where}.{part} must be {what}", param="tools")
    return {"type": "function", "function": {"name": name, **given}}


def _choice(choice: Any) -> Any:
    """Return the choice in a chat call's form; unknown kinds are refused here or there."""
    if not isinstance(choice, dict):
        return choice
    match choice:
        case {"type": "function", "name": str(name)}:
            require_names(choice, "tool_choice", ("type", "name"))
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools"}:
            require_names(choice, "tool_choice", ("type", "mode", "tools"))
            tools = choice.get("tools")
            entries = _entries(tools) if isinstance(tools, list) else tools
            allowed = {"mode": choice.get("mode"), "tools": entries}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case {"type": "function"}:
            raise InvalidRequest(
                'tool_choice must be {"type": "function", "name": ...}', param="tool_choice"
            )
        case {"type": str(kind)}:
            raise UnsupportedParameter(
                f"tool_choice: {shown(kind)} is not supported; use functions", param="tool_choice"
            )
    raise InvalidRequest("tool_choice must have a type", param="tool_choice")


def _entries(tools: list[Any]) -> list[Any]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"tool_choice.tools has {len(tools)} entries, and may have {MAX_TOOLS}: leave some out",
            param="tool_choice",
        )
    return [_entry(each, f"tool_choice.tools[{k}]") for k, each in enumerate(tools)]


def _entry(entry: Any, where: str) -> Any:
    match entry:
        case {"type": "function", "name": str(name)}:
            require_names(entry, where, ("type", "name"))
            return {"type": "function", "function": {"name": name}}
    return None


def _flat_choice(choice: Any) -> Any:
    """Return a checked choice in the flat form."""
    match choice:
        case {"type": "function", "function": function}:
            return {"type": "function", **function}
        case {"type": "allowed_tools", "allowed_tools": allowed}:
            tools = [{"type": "function", **each["function"]} for each in allowed["tools"]]
            return {"type": "allowed_tools", "mode": allowed["mode"], "tools": tools}
    return choice
