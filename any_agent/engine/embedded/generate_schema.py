"""The JSON of SGLang's ``/generate``: validated requests and their answers."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from any_agent.engine.embedded.model_loader import LoadedModel
from any_agent.engine.embedded.request import EngineRequest, FinishReason
from any_agent.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from any_agent.types import GenerationHyperparameters, ModelRequest

_DEFAULT_MAX_NEW_TOKENS = 128
_MAX_RID_LENGTH = 256

# Names that this engine honours, or that change nothing without a prefix cache and with one model.
_TOLERATED = frozenset(
    {
        "input_ids",
        "sampling_params",
        "return_logprob",
        "top_logprobs_num",
        "rid",
        "stream",
        "cache_salt",
        "extra_key",
        "logprob_start_len",
        "return_text_in_logprobs",
        "log_metrics",
        "priority",
        "routing_key",
        "modalities",
    }
)
# Sampling parameters of SGLang that this engine lacks, with the values that change nothing.
_NEUTRAL: Mapping[str, Any] = {
    "min_new_tokens": 0,
    "n": 1,
    "stop_regex": None,
    "ebnf": None,
    "custom_params": None,
}
_GRAMMARS = ("json_schema", "regex", "structural_tag")
_OUR_NAMES = {"sampling_seed": "seed"}
_IGNORED = frozenset({"spaces_between_special_tokens", "stream_interval"})


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One checked ``/generate`` body."""

    request: ModelRequest
    stream: bool
    return_logprob: bool
    skip_special_tokens: bool
    no_stop_trim: bool


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object; {} for an empty body, InvalidRequest for anything else."""
    if not body:
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise InvalidRequest(f"the body is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def parse_generate(body: Mapping[str, Any]) -> GenerateRequest:
    """Check names and types; raise InvalidRequest or UnsupportedParameter (both 400)."""
    for name, value in body.items():
        if name not in _TOLERATED and value not in (None, False, 0, "", [], {}):
            hint = "; use input_ids" if name in ("text", "input_embeds") else ""
            raise UnsupportedParameter(f"{name} is not supported{hint}", param=name)
    ids = body.get("input_ids")
    if not isinstance(ids, list):
        raise InvalidRequest("input_ids must be a list of integers", param="input_ids")
    if ids and isinstance(ids[0], list):
        raise InvalidRequest("batches are not supported: send one request each", param="input_ids")
    sampling = _value(body, "sampling_params", dict, {})
    rid = _value(body, "rid", str, None) or uuid.uuid4().hex
    if len(rid) > _MAX_RID_LENGTH:
        raise InvalidRequest(f"rid is longer than {_MAX_RID_LENGTH}", param="rid")
    return GenerateRequest(
        request=ModelRequest(
            rid=rid,
            input_ids=ids,
            gconfig=_hyperparameters(sampling),
            top_logprobs=_value(body, "top_logprobs_num", int, 0),
        ),
        stream=_value(body, "stream", bool, False),
        return_logprob=_value(body, "return_logprob", bool, False),
        skip_special_tokens=_value(sampling, "skip_special_tokens", bool, True),
        no_stop_trim=_value(sampling, "no_stop_trim", bool, False),
    )


def _hyperparameters(given: Mapping[str, Any]) -> GenerationHyperparameters:
    known: dict[str, Callable[[], Any]] = {
        "max_new_tokens": lambda: _value(given, "max_new_tokens", int, 1 << 30),
        "temperature": lambda: _number(given, "temperature", 1.0),
        "top_p": lambda: _number(given, "top_p", 1.0),
        "top_k": lambda: _top_k(given),
        "ignore_eos": lambda: _value(given, "ignore_eos", bool, False),
        "sampling_seed": lambda: _value(given, "sampling_seed", int, None),
        "stop": lambda: _listed(given, "stop", str),
        "stop_token_ids": lambda: _listed(given, "stop_token_ids", int),
        "min_p": lambda: _number(given, "min_p", 0.0),
        "frequency_penalty": lambda: _number(given, "frequency_penalty", 0.0),
        "presence_penalty": lambda: _number(given, "presence_penalty", 0.0),
        "repetition_penalty": lambda: _number(given, "repetition_penalty", 1.0),
        "logit_bias": lambda: _biases(_value(given, "logit_bias", dict, {})),
    }
    values: dict[str, Any] = {"max_new_tokens": _DEFAULT_MAX_NEW_TOKENS}
    for name, value in given.items():
        if name in known:
            values[_OUR_NAMES.get(name, name)] = known[name]()
        elif name in _GRAMMARS:
            continue
        elif name in _NEUTRAL:
            if value is not None and value != _NEUTRAL[name]:
                raise UnsupportedParameter(
                    f"sampling parameter {name} is not supported", param=name
                )
        elif name not in _IGNORED and name not in ("skip_special_tokens", "no_stop_trim"):
            raise UnsupportedParameter(f"unknown sampling parameter {name}", param=name)
    return GenerationHyperparameters(**values, grammar=_grammar(given))


def _grammar(given: Mapping[str, Any]) -> str | None:
    """Return the grammar. An empty one is none, a schema or tag is a JSON string, as in SGLang."""
    found = [(name, text) for name in _GRAMMARS if (text := _value(given, name, str, None))]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise InvalidRequest(f"only one of {names} can be given", param=found[1][0])
    ((name, text),) = found
    if name == "regex":
        return orjson.dumps({"regex": text}).decode()
    try:
        return orjson.dumps({name: orjson.loads(text)}).decode()
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{name} is not JSON: {error}", param=name) from None


def _biases(given: dict[str, Any]) -> tuple[tuple[int, float], ...]:
    if any(
        not (token.isascii() and token.isdecimal()) or type(bias) not in (int, float)
        for token, bias in given.items()
    ):
        raise InvalidRequest("logit_bias must map token ids to numbers", param="logit_bias")
    return tuple((int(token), float(bias)) for token, bias in given.items())


def _value(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        raise InvalidRequest(f"{name} must be of type {kind.__name__}", param=name)
    return value


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise InvalidRequest(f"{name} must be a number", param=name)
    return float(value)


def _top_k(given: Mapping[str, Any]) -> int:
    value: int = _value(given, "top_k", int, -1)
    return min(value, 1 << 30)


def _listed(given: Mapping[str, Any], name: str, kind: type) -> tuple[Any, ...]:
    value = given.get(name)
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if any(type(v) is not kind for v in values):
        raise InvalidRequest(f"{name} must hold values of type {kind.__name__}", param=name)
    return tuple(values)


def finish_json(finish: FinishReason | None, completion_tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": completion_tokens}
    return {"type": "abort", "message": finish.message or "aborted"}


def answer(
    call: GenerateRequest,
    request: EngineRequest,
    text: str,
    finish: FinishReason | None,
    *,
    start: int,
    count: int,
    latency: float,
    current_version: str,
) -> dict[str, Any]:
    """Return an answer or event with the output tokens ``start`` .. ``count``; totals count all."""
    ids = request.output_ids[start:count]
    # Without a token: one empty span of the current version, as in SGLang.
    spans = request.spans(count) or [(current_version, 0, 0)]
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish_json(finish, count),
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_version": spans[-1][0],
        "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
        "e2e_latency": latency,
    }
    if call.return_logprob:
        logprobs = request.logprobs[start:count]
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(logprobs, ids, strict=True)]
        if request.top:
            # An impossible token has null as its logprob, as in SGLang: JSON has no infinity.
            tops = request.tops[start:count]
            meta["output_top_logprobs"] = [[[p, i, None] for i, p in top] for top in tops]
    return {"text": text, "output_ids": ids, "meta_info": meta}


MAX_STOPS = 64
MAX_TOP = 100
MAX_STOP_LENGTH = 4096


def check_request(
    ids: list[int],
    config: GenerationHyperparameters,
    loaded: LoadedModel,
    max_total_tokens: int | None,
) -> GenerationHyperparameters:
    """Return the parameters, ``max_new_tokens`` limited to the room that the context leaves.

    Raises InvalidRequest for a wrong value, ContextLengthExceeded if the prompt leaves no room.
    """
    check_ids(ids, loaded.vocab_size)
    check_sampling(config)
    _check_bias(config.logit_bias, loaded.vocab_size)
    room = loaded.context_length - len(ids)
    if max_total_tokens is not None:
        room = min(room, max_total_tokens - len(ids))
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {len(ids)} tokens and leaves no room in a context of "
            f"{loaded.context_length}"
        )
    return config if config.max_new_tokens <= room else config.new(max_new_tokens=room)


def check_ids(ids: list[int], vocab_size: int) -> None:
    if not ids:
        raise InvalidRequest("input_ids is empty", param="input_ids")
    # type() because True is an int; set() because most prompts hold one type.
    if set(map(type, ids)) != {int}:
        raise InvalidRequest("input_ids must be a list of integers", param="input_ids")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise InvalidRequest(
            f"input_ids must be 0 .. {vocab_size - 1}, the vocabulary", param="input_ids"
        )


def check_top(count: int, vocab_size: int) -> None:
    if not 0 <= count <= min(MAX_TOP, vocab_size):
        raise InvalidRequest(
            f"top_logprobs_num must be 0 .. {min(MAX_TOP, vocab_size)}", param="top_logprobs_num"
        )


def _check_bias(biases: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    tokens = {token for token, _ in biases}
    if len(tokens) != len(biases) or any(not 0 <= token < vocab_size for token in tokens):
        raise InvalidRequest(
            f"logit_bias must name different ids, 0 .. {vocab_size - 1}", param="logit_bias"
        )
    if not all(math.isfinite(bias) for _, bias in biases):
        raise InvalidRequest("logit_bias must be finite", param="logit_bias")


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda v: 0 <= v <= 1e4, "a finite number, 0 .. 10000"),
    "top_p": (lambda v: 0 < v <= 1, "in (0, 1]"),
    "top_k": (lambda v: v == -1 or v >= 1, "-1 (off) or at least 1"),
    "min_p": (lambda v: 0 <= v <= 1, "in [0, 1]"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "in [-2, 2]"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "in [-2, 2]"),
    "repetition_penalty": (lambda v: 0 < v <= 2, "in (0, 2]"),
    "seed": (lambda v: v is None or -(2**63) <= v < 2**63, "a signed 64-bit integer"),
    "max_new_tokens": (lambda v: v >= 0, "at least 0"),
    "stop": (
        lambda v: len(v) <= MAX_STOPS and all(0 < len(s) <= MAX_STOP_LENGTH for s in v),
        f"at most {MAX_STOPS} strings of 1 .. {MAX_STOP_LENGTH} characters",
    ),
}
"""The sampling parameters with a test of their values, and the rule in words."""


def check_sampling(config: GenerationHyperparameters) -> None:
    for name, (is_valid, rule) in _RULES.items():
        value = getattr(config, name)
        if not is_valid(value):
            raise InvalidRequest(f"{name} must be {rule}, got {value!r}", param=name)
