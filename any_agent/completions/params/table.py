"""The table of parameters: the values that each may have, and its effect.

Honoured ones shape the call. Harmless ones are recorded and change nothing. Refused ones may be
null or have a value that changes nothing (recorded, too); anything else is a 400 that names them,
because ignoring it would answer, and train on, something other than what was requested. Names
without a row are recorded, or refused as unknown: see `unknown_fields.py`.

docs/reference/parameters.md, the request bodies of `/openapi.json` and the checks are made from the
table. This module has the rows of chat and legacy completions, `table_responses.py` and
`table_messages.py` those of the other APIs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

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
    MAX_STOPS,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    MESSAGES,
    NOTE,
    OBJECTS,
    OVERRIDDEN,
    RESPONSES,
    STOPS,
    TEXT,
    TOKENS,
    TOP_LOGPROBS,
    Parameter,
    harmless,
    honoured,
    never,
    only,
    penalty,
)
from any_agent.completions.params.schema_check import Schema
from any_agent.completions.params.table_messages import MESSAGES_AS_IN_CHAT, MESSAGES_ROWS
from any_agent.completions.params.table_responses import AS_IN_CHAT, RESPONSES_ROWS

_LONG: Schema = {**INTEGER, "minimum": -(2**63), "maximum": MAX_INTEGER}
_GRAMMAR = "Use `response_format` or `guided_regex`."
_RECORDED = "Token ids are in the record: export the session."
REFUSED_ROWS: tuple[Parameter, ...] = (
    only("modalities", ["text"], then="The policy writes text only.", apis=CHAT),
    never("audio", "The policy writes text only.", CHAT),
    never("prediction", "Leave it out: it would make the answer no faster here.", CHAT),
    never("web_search_options", "Give the model a search as one of its `tools`.", CHAT),
    never("moderation", "Moderate in the agent.", CHAT),
    only("suffix", "", then="Put what follows into the prompt.", apis=COMPLETIONS),
    never("guided_grammar", _GRAMMAR),
    never("ebnf", _GRAMMAR),
    never("structural_tag", _GRAMMAR),
    never(
        "cache_salt", "Identical prompts share a cache; use separate services where they must not."
    ),
    never("chat_template", "The template is the model's; use `chat_template_kwargs`."),
    only("documents", [], then="Put them into a message.", apis=CHAT),
    only("separate_reasoning", True, then="Reasoning is in `reasoning_content`.", apis=CHAT),
    only("stream_reasoning", True, then="Reasoning is streamed as it is sampled.", apis=CHAT),
    only("include_reasoning", True, then="Leave it out where you read the answer.", apis=CHAT),
    only("add_generation_prompt", True, then="An answer is always a new message.", apis=CHAT),
    only("continue_final_message", False, then="Use `/v1/completions`.", apis=CHAT),
    only("ignore_eos", False, then="Ask for fewer tokens instead."),
    only("min_tokens", 0, then="The model decides when it is done."),
    only("skip_special_tokens", True, then=_RECORDED),
    only("spaces_between_special_tokens", True, then=_RECORDED),
    only("include_stop_str_in_output", False, then=_RECORDED),
    only("no_stop_trim", False, then=_RECORDED),
    only("return_token_ids", False, then=_RECORDED),
    only("return_tokens_as_token_ids", False, then=_RECORDED),
    only("return_hidden_states", False, then="Compute them from the recorded token ids."),
    only("prompt_logprobs", 0, then="Compute them from the recorded token ids."),
    never("truncate_prompt_tokens", "Send fewer messages."),
    only("bad_words", [], then="Use `logit_bias`."),
    only("allowed_token_ids", [], then="Use `logit_bias` or `guided_regex`."),
    only("logits_processors", [], then="Use `logit_bias` or `guided_regex`."),
    only("use_beam_search", False, then="Use `n`."),
    only("length_penalty", 1, then="There is no beam search."),
    only("early_stopping", False, then="There is no beam search."),
)


def _listed(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


_STRING: Schema = {"type": "string"}
_both, _chat, _text = (partial(honoured, apis) for apis in (BOTH, CHAT, COMPLETIONS))
_HONOURED = (
    _both("model", TEXT, "Any name is the policy; the answer repeats it."),
    _chat(
        "messages",
        {**OBJECTS, "minItems": 1},
        "The conversation: text, tool calls and their results, reasoning.",
    ),
    _text(
        "prompt",
        {"anyOf": [_STRING, _listed(_STRING), _listed(INTEGER), _listed(_listed(INTEGER))]},
        "Texts or token ids, as they are: no chat template is applied. Each of several prompts has "
        "its own `n` choices.",
        checked=False,
    ),
    _chat(
        "tools",
        {**OBJECTS, "maxItems": MAX_TOOLS},
        "Functions that the model may call, of different names; together at most "
        f"{MAX_TOOLS_BYTES >> 20} MiB of JSON. `strict` is not enforced, and named as ignored: "
        "a call's arguments are what the model writes. Custom tools are shown as functions with "
        "one text, `input`; a grammar as `format` is shown, not enforced, and named as ignored. "
        "All are refused for a model whose chat template shows neither tools nor calls: describe "
        "them in a message. Where it shows calls but no tools, as DeepSeek V3's, describe them "
        "there as well: these are for reading the calls.",
        checked=False,
    ),
    _chat(
        "tool_choice",
        {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
        "`none`: the prompt shows no tools. `auto`: the model decides. `required`, or a function "
        "or custom tool by name: the prompt ends with the opening of a call, and the rest is the "
        "model's and is trained on: it may end before a name, or write arguments that are not "
        "JSON. `allowed_tools`: the prompt shows these only.",
        checked=False,
    ),
    _chat("parallel_tool_calls", BOOLEAN, "`false`: the answer ends after one call."),
    _chat(
        "functions",
        {**OBJECTS, "maxItems": MAX_TOOLS},
        "The older form of `tools`, not together with them. The answer then has the older "
        "`function_call`, at most one, and that finish reason.",
        checked=False,
    ),
    _chat(
        "function_call",
        {"anyOf": [{"enum": ["none", "auto"]}, {"type": "object"}]},
        "The older form of `tool_choice`; a function as `{name}`.",
        checked=False,
    ),
    _both("stream", BOOLEAN, "Server-sent events, as the tokens come."),
    _both(
        "stream_options",
        {"type": "object"},
        "`include_usage`: a last event with the usage. `include_obfuscation` changes nothing: "
        "there is none.",
        checked=False,
    ),
    _both(
        "max_tokens",
        TOKENS,
        "The most tokens of a choice, if the context and `sampling.max_new_tokens` leave so many; "
        "they are the default, too, but at `/v1/completions` it is "
        f"{COMPLETION_TOKENS}, as with OpenAI.",
    ),
    _chat(
        "max_completion_tokens",
        TOKENS,
        "As `max_tokens`; the smaller one counts if both are given.",
    ),
    _both(
        "n",
        {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        "Choices, sampled at once; each is an interaction of its own. Times the prompts it must "
        f"not exceed {MAX_CHOICES}, nor the samples that a rank takes at once, which may be "
        "fewer (`server.max_inflight_calls`).",
    ),
    _both(
        "stop",
        {"anyOf": [STOPS["items"], STOPS]},
        "The text ends before the first of these; the ids end with the token that completes it.",
        checked=False,
    ),
    _both(
        "stop_token_ids",
        {
            "type": "array",
            "maxItems": MAX_STOPS,
            "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
        },
        "Ids of the vocabulary, beside the template's own stop ids. The answer ends with the first "
        "of them, which is kept.",
    ),
    _both(
        "temperature",
        {"type": "number", "minimum": 0, "maximum": 2},
        "0 is greedy.",
        train=OVERRIDDEN,
        untrainable="truncated_sampling",
    ),
    _both(
        "top_p",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "Only the likeliest tokens that together have this probability.",
        train=OVERRIDDEN,
        untrainable="truncated_sampling",
    ),
    _both(
        "top_k",
        {"type": "integer", "minimum": -1, "maximum": 2**31 - 1},
        "Only so many of the likeliest tokens; -1 and 0 are off.",
        train=OVERRIDDEN,
        untrainable="truncated_sampling",
    ),
    _both(
        "min_p",
        {"type": "number", "minimum": 0, "maximum": 1},
        "Only tokens with this share of the likeliest one's probability.",
        train=OVERRIDDEN,
        untrainable="min_p",
    ),
    _both(
        "seed",
        _LONG,
        "The seed of the draws; each choice derives its own from it.",
        train="Recorded, and not applied: the samples of a group would be equal.",
    ),
    penalty(
        "frequency_penalty",
        -2,
        2,
        "Applies for each earlier occurrence of a token in the answer.",
        0,
    ),
    penalty("presence_penalty", -2, 2, "Applies once to a token that the answer has already.", 0),
    penalty("repetition_penalty", 0, 2, "Divides the logits of what has occurred; 1 is off.", 1),
    _both(
        "logit_bias",
        {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "Added to the logits of token ids.",
        untrainable="logit_bias",
        checked=False,
    ),
    _chat("logprobs", BOOLEAN, "The log-probability of each token of the answer."),
    _text(
        "logprobs",
        TOP_LOGPROBS,
        "The log-probability of each token of the answer, and of so many of the likeliest ones.",
    ),
    _chat(
        "top_logprobs",
        TOP_LOGPROBS,
        "So many of the likeliest tokens at each position; needs `logprobs`.",
    ),
    _text("echo", BOOLEAN, "The text begins with the prompt; not together with `logprobs`."),
    _text(
        "best_of",
        {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES},
        "Must equal `n`: answers that are sampled and thrown away are not recorded.",
    ),
    _chat(
        "response_format",
        {"type": "object"},
        "`text`; `json_object`; `json_schema`, strict or not, of at most "
        f"{MAX_SCHEMA_BYTES >> 10} KiB and {MAX_SCHEMA_DEPTH} levels. A `format` that no grammar "
        "knows (`password`, `binary`) has no effect, and is refused with `strict`. With tools, the "
        "answer has this format or is calls, whose arguments are JSON then; a call that is forced "
        "has no format.",
        untrainable="grammar",
        checked=False,
    ),
    _chat(
        "reasoning_effort",
        {"enum": list(EFFORTS)},
        "An argument of the model's template; only recorded for a template without one. It must "
        "not contradict `chat_template_kwargs`.",
    ),
    _chat(
        "reasoning",
        {"type": "object"},
        "`{effort}` is `reasoning_effort` in another form; `enabled: true` and `exclude: false` "
        "change nothing.",
        checked=False,
    ),
    _chat(
        "chat_template_kwargs",
        NOTE,
        "Arguments of the model's chat template; one that it does not know is refused. Each name "
        "that the template reads may also stand at the top level, if no row here has it.",
    ),
    _chat(
        "enable_thinking",
        BOOLEAN,
        "Turns the model's thinking on or off, as its template's own switch in "
        "`chat_template_kwargs`, which it must not contradict. Where the template has no "
        "switch, it is treated as an unknown parameter.",
    ),
    _chat(
        "thinking",
        {"anyOf": [BOOLEAN, {"type": "object"}]},
        "As `enable_thinking`, in other clients' form: true, false, or `{type}` with `enabled`, "
        "`disabled`, `adaptive` or `auto`; the last two keep the run's choice. Other fields of the "
        "object are recorded.",
        checked=False,
    ),
)
_GRAMMARS = (
    _both(
        "guided_json",
        {"anyOf": [{"type": "object"}, {"type": "string"}]},
        "As `response_format: json_schema`; a schema, also as text.",
        untrainable="grammar",
        checked=False,
    ),
    _both(
        "guided_regex",
        {"type": "string", "minLength": 1, "maxLength": MAX_NOTE_BYTES},
        "The answer's text matches the regular expression.",
        untrainable="grammar",
    ),
    _both(
        "guided_choice",
        {**_listed({**_STRING, "minLength": 1, "maxLength": 1024}), "maxItems": 1024},
        "The answer's text is one of these.",
        untrainable="grammar",
    ),
    _both(
        "structured_outputs",
        {"type": "object"},
        "One of `json`, `regex`, `choice`, `json_object`, as the three above.",
        untrainable="grammar",
        checked=False,
    ),
    _both(
        "regex",
        {"type": "string", "minLength": 1, "maxLength": MAX_NOTE_BYTES},
        "As `guided_regex`.",
        untrainable="grammar",
    ),
)
_HARMLESS = (
    *harmless(
        BOTH,
        ("metadata", NOTE, "For a session's own, see `start_session`."),
        ("priority", _LONG, "Calls have no priorities."),
        ("prompt_cache_key", TEXT, "The cache finds prompts by itself."),
        ("prompt_cache_options", NOTE, "The cache finds prompts by itself."),
        ("prompt_cache_retention", TEXT, "The cache finds prompts by itself."),
        ("request_id", TEXT, "Interactions have ids of their own."),
        ("rid", TEXT, "Interactions have ids of their own."),
        ("safety_identifier", TEXT, "The user's id."),
        ("service_tier", TEXT, "There is one tier."),
        ("store", BOOLEAN, "Sessions are always recorded."),
        ("user", TEXT, "The user's id."),
    ),
    *harmless(CHAT, ("verbosity", TEXT, "Request it in a message.")),
)
_OF_CHAT = {p.name: p for p in (*_HONOURED, *_HARMLESS) if "chat" in p.apis}
PARAMETERS: tuple[Parameter, ...] = (
    *_HONOURED,
    *_GRAMMARS,
    *_HARMLESS,
    *REFUSED_ROWS,
    *(replace(_OF_CHAT[name], apis=RESPONSES) for name in AS_IN_CHAT),
    *(replace(_OF_CHAT[name], apis=MESSAGES) for name in MESSAGES_AS_IN_CHAT),
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
