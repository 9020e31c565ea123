"""The JSON of SGLang's ``/generate``: validated requests and their answers."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from any_agent.chat.output.detokenizer import WindowDetokenizer
from any_agent.engine.embedded.model_loader import LoadedModel
from any_agent.engine.embedded.request import EngineRequest, FinishReason
from any_agent.engine.embedded.stops import Decode, doubtful_end
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
        "lora_path",
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
            adapter=_value(body, "lora_path", str, None),
        ),
        stream=_value(body, "stream", bool, False),
        return_logprob=_value(body, "return_logprob", bool, False),
        skip_special_tokens=_value(sampling, "skip_special_tokens", bool, True),
        no_stop_trim=_value(sampling, "no_stop_trim", bool, False),
    )


def _hyperparameters(given: Mapping[str, Any]) -> GenerationHyperparameters:
    values: dict[str, Any] = {"max_new_tokens": _DEFAULT_MAX_NEW_TOKENS}
    for name, value in given.items():
        if name in _READERS:
            if value is not None:
                values[_OUR_NAMES.get(name, name)] = _READERS[name](name, value)
            elif name == "max_new_tokens":
                values[name] = 1 << 30
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


def _value(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name)
    return default if value is None else _typed(name, value, kind)


def _typed(name: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise InvalidRequest(f"{name} must be of type {kind.__name__}", param=name)
    return value


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise InvalidRequest(f"{name} must be a number", param=name)
    return float(value)


def _top_k(name: str, value: Any) -> int:
    return min(int(_typed(name, value, int)), 1 << 30)


def _listed(name: str, value: Any, kind: type) -> tuple[Any, ...]:
    values = value if isinstance(value, list) else [value]
    if any(type(v) is not kind for v in values):
        raise InvalidRequest(f"{name} must hold values of type {kind.__name__}", param=name)
    return tuple(values)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    given: dict[str, Any] = _typed(name, value, dict)
    if any(
        not (token.isascii() and token.isdecimal()) or type(bias) not in (int, float)
        for token, bias in given.items()
    ):
        raise InvalidRequest("logit_bias must map token ids to numbers", param=name)
    return tuple((int(token), float(bias)) for token, bias in given.items())


_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(_NUMBERS, _number),
    **dict.fromkeys(("max_new_tokens", "sampling_seed"), partial(_typed, kind=int)),
    "top_k": _top_k,
    "ignore_eos": partial(_typed, kind=bool),
    "stop": partial(_listed, kind=str),
    "stop_token_ids": partial(_listed, kind=int),
    "logit_bias": _biases,
}
"""Functions from a sampling parameter's name and value to our value."""


class AnswerWriter:
    """Writes the answer to one request, whole or as the events of a stream."""

    def __init__(
        self,
        call: GenerateRequest,
        request: EngineRequest,
        decode: Decode,
        *,
        version: Callable[[], str],
        started: float,
    ) -> None:
        """``version``: return the engine's weight version; ``started``: by `perf_counter`."""
        self._call = call
        self._request = request
        self._decode = decode
        self._version = version
        self._started = started
        self._decoder = WindowDetokenizer(decode)
        self._stops = () if call.no_stop_trim else request.config.stop
        self._decoded = ""
        self._count = self._shown = 0
        """The tokens and the characters of the events so far."""

    def whole(self, finish: FinishReason) -> dict[str, Any]:
        return self._answer(self._final_text(finish), 0, len(self._request.output_ids), finish)

    def event(
        self, count: int, finish: FinishReason | None, *, incremental: bool
    ) -> dict[str, Any]:
        """Return the event of the first ``count`` tokens, or of the new ones (``incremental``).

        Its text has no half character, and no possible part of a stop string; with ``finish`` it
        is the final one.
        """
        text = self._text_so_far(count) if finish is None else self._final_text(finish)
        start, shown = (self._count, self._shown) if incremental else (0, 0)
        self._count, self._shown = count, len(text)
        return self._answer(text[shown:], start, count, finish)

    def _text_so_far(self, count: int) -> str:
        for token in self._request.output_ids[self._count : count]:
            self._decoded += self._decoder.push([token])
        return self._decoded[: len(self._decoded) - doubtful_end(self._decoded, self._stops)]

    def _final_text(self, finish: FinishReason) -> str:
        """Return the text, without the stop string or stop token unless ``no_stop_trim``."""
        ids = self._request.output_ids
        if self._call.no_stop_trim or finish.type != "stop":
            return self._decode(ids)
        if isinstance(finish.matched, int):
            return self._decode(ids[:-1])
        text = self._decode(ids)
        return text.partition(finish.matched)[0] if finish.matched else text

    def _answer(
        self, text: str, start: int, count: int, finish: FinishReason | None
    ) -> dict[str, Any]:
        """Return an answer with the output tokens ``start`` .. ``count``; totals count all."""
        request = self._request
        ids = request.output_ids[start:count]
        # Without a token: one empty span of the current version, as in SGLang.
        spans = request.spans(count) or [(self._version(), 0, 0)]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": _finish_json(finish, count),
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": count,
            "cached_tokens": request.cached_tokens,
            "weight_version": spans[-1][0],
            "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
            "e2e_latency": time.perf_counter() - self._started,
        }
        if request.adapter is not None:
            # No field of SGLang's, whose answers name no adapter.
            meta["adapter"] = request.adapter
        if self._call.return_logprob:
            logprobs = request.logprobs[start:count]
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [p, i, None] for p, i in zip(logprobs, ids, strict=True)
            ]
            if request.top:
                # An impossible token has null as its logprob, as in SGLang: JSON has no infinity.
                tops = request.tops[start:count]
                meta["output_top_logprobs"] = [[[p, i, None] for i, p in top] for top in tops]
            if request.has_grammar:
                # No field of SGLang's.
                meta["output_token_bound"] = request.bound[start:count]
        return {"text": text, "output_ids": ids, "meta_info": meta}


def _finish_json(finish: FinishReason | None, completion_tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    if finish.type == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.type == "length":
        return {"type": "length", "length": completion_tokens}
    return {"type": "abort", "message": finish.message or "aborted"}


MAX_STOPS = 64
MAX_TOP = 100
MAX_STOP_LENGTH = 4096


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


def check_request(
    request: ModelRequest, ids: list[int], loaded: LoadedModel, max_total_tokens: int | None
) -> GenerationHyperparameters:
    """Return the parameters, ``max_new_tokens`` limited to the room that the context leaves.

    Raises InvalidRequest for a wrong value, ContextLengthExceeded if the prompt leaves no room.
    """
    config, vocab_size = request.gconfig, loaded.vocab_size
    most = min(MAX_TOP, vocab_size)
    if not 0 <= request.top_logprobs <= most:
        raise InvalidRequest(f"top_logprobs_num must be 0 .. {most}", param="top_logprobs_num")
    if not ids:
        raise InvalidRequest("input_ids is empty", param="input_ids")
    # type() because True is an int; set() because most prompts hold one type.
    if set(map(type, ids)) != {int}:
        raise InvalidRequest("input_ids must be a list of integers", param="input_ids")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise InvalidRequest(
            f"input_ids must be 0 .. {vocab_size - 1}, the vocabulary", param="input_ids"
        )
    for name, (is_valid, rule) in _RULES.items():
        value = getattr(config, name)
        if not is_valid(value):
            raise InvalidRequest(f"{name} must be {rule}, got {value!r}", param=name)
    _check_bias(config.logit_bias, vocab_size)
    room = loaded.context_length - len(ids)
    if max_total_tokens is not None:
        room = min(room, max_total_tokens - len(ids))
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {len(ids)} tokens and leaves no room in a context of "
            f"{loaded.context_length}"
        )
    return config if config.max_new_tokens <= room else config.new(max_new_tokens=room)


def _check_bias(biases: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    tokens = {token for token, _ in biases}
    if len(tokens) != len(biases) or any(not 0 <= token < vocab_size for token in tokens):
        raise InvalidRequest(
            f"logit_bias must name different ids, 0 .. {vocab_size - 1}", param="logit_bias"
        )
    if not all(math.isfinite(bias) for _, bias in biases):
        raise InvalidRequest("logit_bias must be finite", param="logit_bias")
