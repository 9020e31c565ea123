"""The sampling of a request, from the agent's parameters and the run's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from any_agent.completions.params.parameter import MAX_BIASES, MAX_STOP_LENGTH, MAX_STOPS
from any_agent.completions.params.schema_check import check, require_object
from any_agent.completions.params.table import TABLE
from any_agent.errors import InvalidRequest
from any_agent.types import GenerationHyperparameters, SessionMode

_OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "seed")
"""Parameters that the run replaces in train sessions: truncation makes the recorded
log-probabilities wrong, and a seed would make the sessions of a group equal."""
TOKEN_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""The agents' names of `max_new_tokens`; the smallest counts."""
_HONOURED = ("frequency_penalty", "presence_penalty", "repetition_penalty")
_INTEGERS = ("top_k", "seed")


def sampling_of(
    body: Mapping[str, Any],
    *,
    mode: SessionMode,
    run: GenerationHyperparameters,
    tokens: int,
    grammar: str | None,
) -> tuple[GenerationHyperparameters, dict[str, Any]]:
    """Return the sampling to use, and the agent's values that the run replaced.

    In eval sessions ``run`` sets the temperature where the body has none, and the token limit.
    ``tokens`` is the limit where the body has none. Only `stop` and `logit_bias` are checked here.
    """
    limits = {k: body[k] for k in TOKEN_LIMITS if body.get(k) is not None}
    limit = min(run.max_new_tokens, *(limits.values() or (tokens,)))
    # The larger of two limits has no effect, whatever the run's is.
    overrides = limits if limits and min(limits.values()) > limit else {}
    wanted = {k: _value(body, k) for k in _OVERRIDDEN if body.get(k) is not None}
    gconfig = GenerationHyperparameters(temperature=run.temperature)
    if mode is SessionMode.TRAIN:
        gconfig = run
        overrides |= {k: body[k] for k, value in wanted.items() if getattr(run, k) != value}
        wanted = {}
    stop_ids = {*run.stop_token_ids, *(body.get("stop_token_ids") or ())}
    return gconfig.new(
        max_new_tokens=limit,
        stop=_stops(body.get("stop")),
        stop_token_ids=tuple(sorted(stop_ids)),
        logit_bias=_biases(body.get("logit_bias")),
        grammar=grammar,
        **{k: float(body[k]) for k in _HONOURED if body.get(k) is not None},
        **wanted,
    ), overrides


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of one of several choices; the first one has the call's own."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(b"%d.%d" % (seed, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _value(body: Mapping[str, Any], name: str) -> float:
    value = body[name]
    if name == "top_k" and value < 1:
        return -1
    return value if name in _INTEGERS else float(value)


def _stops(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    try:
        check(stop, TABLE["chat"]["stop"].schema, "stop")
    except InvalidRequest:
        raise InvalidRequest(
            f"stop must be a non-empty string or up to {MAX_STOPS} of them, each of at most "
            f"{MAX_STOP_LENGTH} characters",
            param="stop",
        ) from None
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    biases = require_object(value, "logit_bias")
    if len(biases) > MAX_BIASES:
        raise InvalidRequest(f"logit_bias may have at most {MAX_BIASES} tokens", param="logit_bias")
    one = TABLE["chat"]["logit_bias"].schema["additionalProperties"]
    out = {}
    for token, bias in biases.items():
        if not isinstance(token, str) or not (token.isascii() and token.isdigit()):
            raise InvalidRequest("the keys of logit_bias must be token ids", param="logit_bias")
        if len(token) > 10 or int(token) >= 2**31:
            raise InvalidRequest("logit_bias has a token id beyond 2^31", param="logit_bias")
        check(bias, one, "logit_bias")
        if bias:
            out[int(token)] = float(bias)
    return tuple(sorted(out.items()))
