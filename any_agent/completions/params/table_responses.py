"""The rows of `/v1/responses` in the table of parameters."""

from __future__ import annotations

from functools import partial

from any_agent.completions.params.parameter import (
    BOOLEAN,
    MAX_INTEGER,
    MAX_NOTE_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_TOOLS,
    NOTE,
    OBJECTS,
    RESPONSES,
    TEXT,
    TOKENS,
    TOP_LOGPROBS,
    Parameter,
    harmless,
    honoured,
    never,
    only,
)

AS_IN_CHAT = (
    *("model", "parallel_tool_calls", "stream", "stop", "stop_token_ids", "temperature", "top_p"),
    *("top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "chat_template_kwargs", "enable_thinking", "thinking", "priority"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id"),
    *("safety_identifier", "service_tier", "user"),
)
"""Rows that are those of a chat call."""
INCLUDES = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""The last six name parts that no answer has here."""

MAX_FORMAT_NAME = 64  # characters of a schema's name, as at OpenAI

_responses = partial(honoured, RESPONSES)
_HONOURED = (
    _responses(
        "input",
        {"anyOf": [{"type": "string"}, OBJECTS]},
        "A text, or items: messages, calls of functions and custom tools and their outputs, "
        "reasoning, and references to items of the session's earlier answers. Text is all that "
        "they may hold. It may be empty or left out where `previous_response_id` is given.",
        checked=False,
    ),
    _responses(
        "instructions",
        {"type": "string"},
        "The system message. A previous response's instructions do not apply.",
    ),
    _responses(
        "previous_response_id",
        TEXT,
        "An answer of the same session, of any API, that the input continues.",
    ),
    _responses(
        "tools",
        {**OBJECTS, "maxItems": MAX_TOOLS},
        "Functions, as in a chat call but flat: `type`, `name`, `description`, `parameters`, "
        "`strict`, which is not enforced, and named as ignored; custom tools: `type`, `name`, "
        "`description`, `format`, as in a chat call, too; and namespaces of both. Tools that only "
        "OpenAI runs are left out, and named as ignored, too.",
        checked=False,
    ),
    _responses(
        "tool_choice",
        {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
        "As in a chat call; a function or custom tool by name as `{type, name}`, with its "
        "`namespace` if any.",
        checked=False,
    ),
    _responses(
        "max_output_tokens",
        TOKENS,
        "The most tokens of the answer, reasoning included, if the context and "
        "`sampling.max_new_tokens` leave so many; they are the default, too.",
    ),
    _responses(
        "text",
        {"type": "object"},
        "`format`: `text`, `json_object`, or `json_schema`, strict or not, of at most "
        f"{MAX_SCHEMA_BYTES >> 10} KiB and {MAX_SCHEMA_DEPTH} levels, with a `name` of at most "
        f"{MAX_FORMAT_NAME} characters and a `description` of at most {MAX_NOTE_BYTES >> 10} KiB; "
        "together with tools as `response_format` of a chat call. `verbosity` is recorded: say it "
        "in a message.",
        untrainable="grammar",
        checked=False,
    ),
    _responses(
        "reasoning",
        {"type": "object"},
        "`effort` as `reasoning_effort` of a chat call. `summary` is recorded: answers have "
        "the whole reasoning. `context` has no effect.",
        checked=False,
    ),
    _responses(
        "include",
        {"type": "array", "maxItems": 64, "items": {"enum": list(INCLUDES)}},
        "`message.output_text.logprobs`: the log-probability of each token of the text. "
        "`reasoning.encrypted_content`: the reasoning once more, as an opaque text that brings it "
        "back when it is sent alone. The others change nothing.",
        checked=False,
    ),
    _responses(
        "top_logprobs",
        TOP_LOGPROBS,
        "So many of the likeliest tokens at each position, where `include` asks for "
        "log-probabilities.",
    ),
    _responses(
        "stream_options",
        {"type": "object"},
        "`include_obfuscation` changes nothing: there is none.",
        checked=False,
    ),
)
_COUNT = {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}
_HARMLESS = harmless(
    RESPONSES,
    ("client_metadata", NOTE, "The client's own notes."),
    ("max_tool_calls", _COUNT, "A limit of OpenAI's own tools, which do not run here."),
    ("metadata", NOTE, "The answer repeats it, as texts."),
    ("store", BOOLEAN, "Sessions are always recorded, and their answers can be retrieved."),
)
_REFUSED = (
    only("background", False, then="Stream instead.", apis=RESPONSES),
    only("truncation", "disabled", then="Send fewer items.", apis=RESPONSES),
    only("context_management", [], then="Shorten the input in the agent.", apis=RESPONSES),
    never("conversation", "Use `previous_response_id`, or send the items.", RESPONSES),
    never("prompt", "Send what the template would say.", RESPONSES),
    never("moderation", "Moderate in the agent.", RESPONSES),
)
RESPONSES_ROWS: tuple[Parameter, ...] = (*_HONOURED, *_HARMLESS, *_REFUSED)
