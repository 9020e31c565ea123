"""The rows of `/v1/messages` in the table of parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

from any_agent.completions.params.parameter import (
    MAX_SCHEMA_BYTES,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    MESSAGES,
    NOTE,
    OBJECTS,
    STOPS,
    TEXT,
    TOKENS,
    Parameter,
    harmless,
    honoured,
    never,
    only,
)
from any_agent.completions.params.schema_check import Schema

MESSAGES_AS_IN_CHAT = (
    *("model", "stream", "temperature", "top_p", "top_k"),
    *("chat_template_kwargs", "enable_thinking"),
)
"""Rows that are those of a chat call."""
_TEXTS: Schema = {"anyOf": [{"type": "string"}, OBJECTS]}
_messages = partial(honoured, MESSAGES)
_HONOURED = (
    _messages(
        "max_tokens",
        TOKENS,
        "The most tokens of the answer, if the context and `sampling.max_new_tokens` leave so "
        "many.",
    ),
    _messages(
        "messages",
        {**OBJECTS, "minItems": 1},
        "The conversation: text, `tool_use` and `tool_result`, `thinking`. It ends with a "
        "user's message: answers are not prefilled.",
    ),
    _messages(
        "system",
        _TEXTS,
        "A text, or text blocks, which are joined as they are. Claude Code's "
        "`x-anthropic-billing-header`, another one with each request, is left out.",
        checked=False,
    ),
    _messages(
        "tools",
        {**OBJECTS, "maxItems": MAX_TOOLS},
        "What the model may call, each with a name of its own and an `input_schema`; together at "
        f"most {MAX_TOOLS_BYTES >> 20} MiB of JSON. `strict` is not enforced, and named as "
        "ignored. A tool that only Anthropic runs is left out and named as ignored; a request "
        "without any other is refused, and so are `bash_...` and the like without an "
        "`input_schema`. One with `defer_loading` is shown where a `tool_reference` names it. A "
        "streamed call's input comes when it is whole, whatever `eager_input_streaming` says.",
        checked=False,
    ),
    _messages(
        "tool_choice",
        {"type": "object"},
        "`auto`, `any`, `tool` by name, `none`: as `auto`, `required`, a function and `none` of "
        "`/v1/chat/completions`. With `disable_parallel_tool_use` the answer ends after one call.",
        checked=False,
    ),
    _messages(
        "stop_sequences",
        STOPS,
        "The text ends before the first of these; the ids end with the token that completes it.",
    ),
    _messages(
        "thinking",
        {"type": "object"},
        "`enabled` and `disabled` turn the model's thinking on and off, where its template has a "
        "switch; `adaptive` leaves it as the run has it. `budget_tokens` is recorded: the answer's "
        "`max_tokens` holds for both. `display: omitted` leaves the text out of the answer.",
        checked=False,
    ),
    _messages(
        "output_config",
        {"type": "object"},
        "`effort`, as `reasoning_effort`, without effect where thinking is disabled; `format`: a "
        f"`json_schema` of at most {MAX_SCHEMA_BYTES >> 10} KiB, together with tools as "
        "`response_format` of a chat call.",
        untrainable="grammar",
        checked=False,
    ),
    _messages(
        "output_format",
        {"type": "object"},
        "The older place of `format` of `output_config`.",
        untrainable="grammar",
        checked=False,
    ),
)
_CACHE = "The cache finds prompts by itself."
_HARMLESS = harmless(
    MESSAGES,
    ("metadata", NOTE, "The user's id; for a session's metadata, see `start_session`."),
    ("service_tier", TEXT, "There is one tier."),
    ("cache_control", NOTE, f"{_CACHE} In blocks and tools it is not even recorded."),
    ("inference_geo", TEXT, "The service has no choice of regions."),
    ("speed", TEXT, "There is one speed."),
    ("user_profile_id", TEXT, "The user's id."),
    ("diagnostics", NOTE, _CACHE),
    ("billing_policy", NOTE, "Nothing is billed."),
    ("anthropic_version", TEXT, "Answers have the newest version's form."),
    (
        "anthropic_beta",
        {"type": "array", "maxItems": 64, "items": TEXT},
        "What a beta adds to the body is honoured or refused by its own name.",
    ),
)
_KEPT: tuple[Any, ...] = ("all", {"type": "all"})
# Anthropic's SDK requests a thread where it runs tools, and continues without one at this error.
_UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
_REFUSED = (
    only(
        "context_management",
        {},
        {"edits": []},
        *({"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep in _KEPT),
        then="Edit the messages in the agent.",
        apis=MESSAGES,
    ),
    never("container", "Run code in the agent.", MESSAGES),
    only(
        "mcp_servers",
        [],
        then="Connect to them in the agent, and send their tools as `tools`.",
        apis=MESSAGES,
    ),
    never("compaction", "Shorten the messages in the agent.", MESSAGES),
    only("fallbacks", [], then="Try again in the agent.", apis=MESSAGES),
    never("fallback_credit_token", "Try again in the agent.", MESSAGES),
    never("thread", "Send the whole conversation.", MESSAGES, details=_UNTHREADED),
)
MESSAGES_ROWS: tuple[Parameter, ...] = (*_HONOURED, *_HARMLESS, *_REFUSED)
