"""The table of parameters: the values that each may have, and its effect.

Honoured ones shape the call. Harmless ones are recorded and change nothing. Refused ones may be
null or have a value that changes nothing (recorded, too); anything else is a 400 that names them,
because ignoring it would answer, and train on, something other than what was requested. Names that
are not here are recorded, or refused as unknown: see `unknown_fields.py`.

docs/reference/parameters.md, the request bodies of `/openapi.json` and the checks are made from
it. The rows here are those of chat and legacy completions, except the refused ones
(`table_refused.py`);
`table_responses.py` and `table_messages.py` hold those of the other APIs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from any_agent.chat.template_kwargs import EFFORTS
from any_agent.completions.params.parameter import (
    BOOLEAN,
    BOTH,
    CHAT,
    COMPLETION_TOKENS,
    COMPLETIONS,
    INTEGER,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_INTEGER,
    MAX_NOTE_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    MAX_TOP_LOGPROBS,
    MESSAGES,
    NOTE,
    OBJECTS,
    OVERRIDDEN,
    RESPONSES,
    TEXT,
    TOKENS,
    Parameter,
    penalty,
)
from any_agent.completions.params.schema_check import Schema
from any_agent.completions.params.table_messages import MESSAGES_ROWS, SWITCHES_AS_IN_CHAT
from any_agent.completions.params.table_refused import REFUSED_ROWS
from any_agent.completions.params.table_responses import AS_IN_CHAT, RESPONSES_ROWS

_HONOURED = (
    Parameter("model", "honoured", TEXT, "Any name is the policy; the answer repeats it."),
    Parameter(
        "messages",
        "honoured",
        {**OBJECTS, "minItems": 1},
        "The conversation: text, tool calls and their results, reasoning.",
        CHAT,
    ),
    Parameter(
        "prompt",
        "honoured",
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": INTEGER, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": INTEGER, "minItems": 1},
                    "minItems": 1,
                },
            ]
        },
        "Texts or token ids, as they are: no chat template is applied. Each of several prompts has "
        "its own `n` choices.",
        COMPLETIONS,
        checked=False,
    ),
    Parameter(
        "tools",
        "honoured",
        {**OBJECTS, "maxItems": MAX_TOOLS},
        "Functions that the model may call, of different names; together at most "
        f"{MAX_TOOLS_BYTES >> 20} MiB of JSON. `strict` is not enforced: a call's arguments are "
        "what the model writes. Custom tools are refused, and so are all for a model whose chat "
        "template shows neither tools nor calls: describe them in a message. Where it shows calls "
        "but no tools, as DeepSeek V3's, describe them there as well: these are for reading the "
        "calls.",
        CHAT,
        checked=False,
    ),
    Parameter(
        "tool_choice",
        "honoured",
        {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
        "`none`: the model is not told of the tools. `auto`: it decides. `required`, or a function "
        "by name: the answer's opening is that of a call, and the rest is the model's: it may end "
        "before a name, or write arguments that are no JSON. `allowed_tools`: it is told of these "
        "only.",
        CHAT,
        untrainable="tool_choice",
        checked=False,
    ),
    Parameter(
        "parallel_tool_calls",
        "honoured",
        BOOLEAN,
        "`false`: the answer ends after one call.",
        CHAT,
    ),
    Parameter(
        "functions",
        "honoured",
        {**OBJECTS, "maxItems": MAX_TOOLS},
        "The older form of `tools`, not together with them. The answer then has the older "
        "`function_call`, at most one, and that finish reason.",
        CHAT,
        checked=False,
    ),
    Parameter(
        "function_call",
        "honoured",
        {"anyOf": [{"enum": ["none", "auto"]}, {"type": "object"}]},
        "The older form of `tool_choice`; a function as `{name}`.",
        CHAT,
        untrainable="tool_choice",
        checked=False,
    ),
    Parameter("stream", "honoured", BOOLEAN, "Server-sent events, as the tokens come."),
    Parameter(
        "stream_options",
        "honoured",
        {"type": "object"},
        "`include_usage`: a last event with the usage. `include_obfuscation` changes nothing: "
        "there is none.",
        checked=False,
    ),
    Parameter(
        "max_tokens",
        "honoured",
        TOKENS,
        "The most tokens of a choice, if the context and `sampling.max_new_tokens` leave so many; "
        "they are the default, too, but at `/v1/completions` it is "
        f"{COMPLETION_TOKENS}, as with OpenAI.",
    ),
    Parameter(
        "max_completion_tokens",
        "honoured",
        TOKENS,
        "The same; the smaller one counts if both are given.",
        CHAT,
    ),
    Parameter(
        "n",
        "honoured",
        {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        "Choices, sampled at once; each is an interaction of its own. Times the prompts it must "
        f"not exceed {MAX_CHOICES}, nor the samples that a rank takes at once, which may be "
        "fewer (`server.max_inflight_calls`).",
    ),
    Parameter(
        "stop",
        "honoured",
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
                {
                    "type": "array",
                    "maxItems": MAX_STOPS,
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
                },
            ]
        },
        "The text ends before the first of these; the ids end with the token that completes it.",
        checked=False,
    ),
    Parameter(
        "stop_token_ids",
        "honoured",
        {
            "type": "array",
            "maxItems": MAX_STOPS,
            "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        },
        "Of the vocabulary. The answer ends with the first of these, which is kept, beside the "
        "template's own.",
    ),
    Parameter(
        "temperature",
        "honoured",
        {"type": "number", "minimum": 0, "maximum": 2},
        "0 is greedy.",
        train=OVERRIDDEN,
        untrainable="truncated_sampling",
    ),
    Parameter(
        "top_p",
        "honoured",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "Only the likeliest tokens that together have this probability.",
        train=OVERRIDDEN,
        untrainable="truncated_sampling",
    ),
    Parameter(
        "top_k",
        "honoured",
        {"type": "integer", "minimum": -1, "maximum": 2**31 - 1},
        "Only so many of the likeliest tokens; -1 and 0 are off.",
        train=OVERRIDDEN,
        untrainable="truncated_sampling",
    ),
    Parameter(
        "min_p",
        "honoured",
        {"type": "number", "minimum": 0, "maximum": 1},
        "Only tokens with this share of the likeliest one's probability.",
        train=OVERRIDDEN,
        untrainable="min_p",
    ),
    Parameter(
        "seed",
        "honoured",
        {"type": "integer", "minimum": -(2**63), "maximum": MAX_INTEGER},
        "Of the draws; each choice derives its own from it.",
        train="Recorded, and not applied: the samples of a group would be clones.",
    ),
    penalty("frequency_penalty", -2, 2, "Per earlier occurrence of a token in the answer.", 0),
    penalty("presence_penalty", -2, 2, "Once, for a token that the answer has already.", 0),
    penalty("repetition_penalty", 0, 2, "Divides the logits of what has occurred; 1 is off.", 1),
    Parameter(
        "logit_bias",
        "honoured",
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "Added to the logits of token ids.",
        untrainable="logit_bias",
        checked=False,
    ),
    Parameter(
        "logprobs",
        "honoured",
        BOOLEAN,
        "The log-probability of each token of the answer.",
        CHAT,
    ),
    Parameter(
        "logprobs",
        "honoured",
        {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "The log-probability of each token of the answer, and of so many of the likeliest ones.",
        COMPLETIONS,
    ),
    Parameter(
        "top_logprobs",
        "honoured",
        {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS},
        "So many of the likeliest tokens at each position; needs `logprobs`.",
        CHAT,
    ),
    Parameter(
        "echo",
        "honoured",
        BOOLEAN,
        "The text begins with the prompt; not together with `logprobs`.",
        COMPLETIONS,
    ),
    Parameter(
        "best_of",
        "honoured",
        {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        "Must equal `n`: answers that are sampled and thrown away are not recorded.",
        COMPLETIONS,
    ),
    Parameter(
        "response_format",
        "honoured",
        {"type": "object"},
        "`text`; `json_object`; `json_schema`, strict or not, of at most "
        f"{MAX_SCHEMA_BYTES >> 10} KiB and {MAX_SCHEMA_DEPTH} levels. With tools, the answer has "
        "this format or is calls, whose arguments are JSON then; a call that is forced has no "
        "format.",
        CHAT,
        untrainable="grammar",
        checked=False,
    ),
    Parameter(
        "reasoning_effort",
        "honoured",
        {"enum": list(EFFORTS)},
        "As the model's template takes it; recorded only, where it has nothing of the kind. What "
        "`chat_template_kwargs` contradict is refused.",
        CHAT,
    ),
    Parameter(
        "reasoning",
        "honoured",
        {"type": "object"},
        "`{effort}` is `reasoning_effort`, as some clients write it; `enabled: true` and "
        "`exclude: false` are so anyway.",
        CHAT,
        checked=False,
    ),
    Parameter(
        "chat_template_kwargs",
        "honoured",
        NOTE,
        "Arguments of the model's chat template; one that it does not know is refused. Each name "
        "that the template reads may also stand at the top level, if no row here has it.",
        CHAT,
    ),
    Parameter(
        "enable_thinking",
        "honoured",
        BOOLEAN,
        "Turns the model's thinking on or off, as its template's own switch in "
        "`chat_template_kwargs`; what that one contradicts is refused. Where the template has no "
        "switch, it is treated as an unknown parameter.",
        CHAT,
    ),
    Parameter(
        "thinking",
        "honoured",
        {"anyOf": [BOOLEAN, {"type": "object"}]},
        "The same, as some clients write it: true, false, or `{type}` with `enabled`, `disabled`, "
        "`adaptive` or `auto`, of which the last two leave it as the run has it. What else the "
        "object has is recorded.",
        CHAT,
        checked=False,
    ),
)
_GRAMMARS = (
    Parameter(
        "guided_json",
        "honoured",
        {"anyOf": [{"type": "object"}, {"type": "string"}]},
        "As `response_format: json_schema`; a schema, also as text.",
        untrainable="grammar",
        checked=False,
    ),
    Parameter(
        "guided_regex",
        "honoured",
        {"type": "string", "minLength": 1, "maxLength": MAX_NOTE_BYTES},
        "The answer's text matches the regular expression.",
        untrainable="grammar",
    ),
    Parameter(
        "guided_choice",
        "honoured",
        {
            "type": "array",
            "minItems": 1,
            "maxItems": 1024,
            "items": {"type": "string", "minLength": 1, "maxLength": 1024},
        },
        "The answer's text is one of these.",
        untrainable="grammar",
    ),
    Parameter(
        "structured_outputs",
        "honoured",
        {"type": "object"},
        "One of `json`, `regex`, `choice`, `json_object`, as the three above.",
        untrainable="grammar",
        checked=False,
    ),
    Parameter(
        "regex",
        "honoured",
        {"type": "string", "minLength": 1, "maxLength": MAX_NOTE_BYTES},
        "As `guided_regex`.",
        untrainable="grammar",
    ),
)
_NOTED: tuple[tuple[str, Schema, str, tuple[str, ...]], ...] = (
    ("metadata", NOTE, "For a session's own, see `start_session`.", BOTH),
    ("priority", {**INTEGER, "minimum": -(2**63), "maximum": MAX_INTEGER}, "None here.", BOTH),
    ("prompt_cache_key", TEXT, "The cache finds prompts by itself.", BOTH),
    ("prompt_cache_options", NOTE, "The cache finds prompts by itself.", BOTH),
    ("prompt_cache_retention", TEXT, "The cache finds prompts by itself.", BOTH),
    ("request_id", TEXT, "Interactions have ids of their own.", BOTH),
    ("rid", TEXT, "Interactions have ids of their own.", BOTH),
    ("safety_identifier", TEXT, "Who the user is.", BOTH),
    ("service_tier", TEXT, "There is one.", BOTH),
    ("store", BOOLEAN, "Sessions are recorded whatever it says.", BOTH),
    ("user", TEXT, "Who the user is.", BOTH),
    ("verbosity", TEXT, "Say it in a message.", CHAT),
)
_HARMLESS = tuple(
    Parameter(name, "harmless", schema, meaning, apis) for name, schema, meaning, apis in _NOTED
)
_OF_CHAT = {p.name: p for p in (*_HONOURED, *_HARMLESS) if "chat" in p.apis}
PARAMETERS: tuple[Parameter, ...] = (
    *_HONOURED,
    *_GRAMMARS,
    *_HARMLESS,
    *REFUSED_ROWS,
    *(replace(_OF_CHAT[name], apis=RESPONSES) for name in AS_IN_CHAT),
    *(replace(_OF_CHAT[name], apis=MESSAGES) for name in SWITCHES_AS_IN_CHAT),
    *RESPONSES_ROWS,
    *MESSAGES_ROWS,
)
TABLE: dict[str, dict[str, Parameter]] = {
    api: {p.name: p for p in PARAMETERS if api in p.apis} for api in (*BOTH, *RESPONSES, *MESSAGES)
}
"""The rows of the built-in APIs: by the API's name, then by the parameter's."""


def request_schema(parameters: Mapping[str, Parameter], required: Collection[str]) -> Schema:
    """Return the JSON schema of a request with these parameters, for `/openapi.json`."""
    properties = {}
    for p in parameters.values():
        schema = p.schema if p.name in required else _or_null(p.schema)
        properties[p.name] = {**schema, "description": p.meaning}
    return {
        "type": "object",
        "required": list(required),
        # Unknown ones are recorded, unless `server.unknown_parameters` is `refuse`.
        "additionalProperties": True,
        "properties": properties,
    }


def _or_null(schema: Schema) -> Schema:
    if schema.get("type") == "null":
        return schema
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    if "enum" in schema:
        return {"enum": [*schema["enum"], None]}
    return {**schema, "type": [schema["type"], "null"]}
