"""Checks a `/v1/responses` body by the table of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from any_agent.completions.params.call import ChatCall, ParseSettings
from any_agent.completions.params.grammar import grammar_text, schema_grammar, unless_forced
from any_agent.completions.params.parameter import MAX_NOTE_BYTES, UnknownParameters
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
from any_agent.completions.params.unknown_fields import UnknownFields
from any_agent.completions.responses.history import (
    ID_PREFIX,
    ItemHistory,
    full_lines,
    messages_before,
)
from any_agent.completions.responses.input_items import messages_of, require_few
from any_agent.completions.responses.tools import (
    CUSTOM_FORMATS,
    NAMESPACES,
    Names,
    flat_tools,
    responses_tools,
)
from any_agent.errors import InvalidRequest, UnsupportedParameter
from any_agent.record import InteractionTree
from any_agent.types import Message

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"
_FORMAT_NAME = {"type": "string", "minLength": 1, "maxLength": MAX_FORMAT_NAME}
_VERBOSITIES = {"enum": ["low", "medium", "high"]}
_CONTEXTS = ("current_turn", "all_turns")
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
    names: Names = field(default_factory=dict)
    """The group and the own name of each function of a group, by the name that the model sees."""


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
    tools = responses_tools(body, rest, refuse=settings.unknown == "refuse")
    forced = tools.forced
    grammar, text = _text(body.get("text"))
    grammar, asked_by = unless_forced(grammar, "text.format", forced, rest)
    effort, reasoning = _reasoning(body.get("reasoning"), rest, settings.unknown)
    _check_stream_options(body.get("stream_options"))
    messages, before = _messages(body, tree, context_length)
    logprobs = _LOGPROBS in include
    call = call_of(body, recorded, rest, settings, grammar=grammar, effort=effort)
    repeated = _repeated(
        body, text=text, reasoning=reasoning, tools=tools.repeated, tool_choice=tools.choice
    )
    elsewhere = set(recorded)
    groups = tools.groups
    if flat_tools(tools.shown, groups, tools.custom) == repeated.get("tools", []):
        elsewhere.add("tools")
    kept = {name: value for name, value in repeated.items() if name not in elsewhere}
    if groups:
        kept[NAMESPACES] = groups
    if tools.custom:
        kept[CUSTOM_FORMATS] = dict(tools.custom)
    if kept.get("instructions"):
        # The instructions are recorded as the first messages' lines, so their number is enough.
        kept["instructions"] = full_lines(kept["instructions"])
    chat = replace(
        call,
        messages=messages,
        tools=tools.shown,
        custom=frozenset(tools.custom),
        logprobs=logprobs,
        top_logprobs=(body.get("top_logprobs") or 0) if logprobs else 0,
        forced_call=forced,
        format_parameter=asked_by if grammar is not None else None,
        id_prefix=ID_PREFIX,
        prompt_parameter="input",
        goes_on_from=before,
        kept={"responses": kept | _included(logprobs, _ENCRYPTED in include)},
    )
    return ResponsesCall(chat, repeated, _ENCRYPTED in include, tools.names)


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


def _reasoning(
    value: Any, rest: UnknownFields, unknown: UnknownParameters
) -> tuple[str | None, dict[str, Any]]:
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
        value = given.get(name)
        if value in (None, neutral):
            continue
        if name == "context" and value in _CONTEXTS and unknown != "refuse":
            # The chat template decides which earlier reasoning the model sees.
            rest.ignore("reasoning.context", value)
            continue
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
