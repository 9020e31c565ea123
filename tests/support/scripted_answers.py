"""The scripted engine's JSON: what it refuses, and what it answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import orjson

from tests.support.scripted_run import Running

_RANGES = {
    "temperature": (0, math.inf),
    "min_p": (0, 1),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}
_OTHERS = {
    "max_new_tokens",
    "top_p",
    "top_k",
    "ignore_eos",
    "stop",
    "stop_token_ids",
    "sampling_seed",
    "repetition_penalty",
    "logit_bias",
    "json_schema",
    "regex",
    "structural_tag",
}


def problem(body: Mapping[str, Any], context_length: int) -> str | None:
    """What SGLang would answer 400 to, if anything."""
    params = body["sampling_params"]
    unknown = set(params) - _OTHERS - set(_RANGES)
    if unknown:
        return f"unknown parameters {unknown}"
    for name, (low, high) in _RANGES.items():
        if not low <= params.get(name, low) <= high:
            return f"bad {name}"
    if not isinstance(params.get("sampling_seed", 0), int):
        return "bad sampling_seed"
    if not 0 < params.get("top_p", 1) <= 1:
        return "bad top_p"
    if params.get("top_k", -1) < -1:
        return "bad top_k"
    if not 0 < params.get("repetition_penalty", 1) <= 2:
        return "bad repetition_penalty"
    if not all(token.isdecimal() for token in params.get("logit_bias", {})):
        return "bad logit_bias"
    if "json_schema" in params:
        if "regex" in params:
            return "only one grammar"
        try:
            json.loads(params["json_schema"])
        except ValueError:
            return "bad json_schema"
    if "regex" in params:
        try:
            re.compile(params["regex"])
        except re.error as error:
            return f"Invalid grammar request with cache hit=False: {error}"
    if len(body["input_ids"]) >= context_length:
        return "the prompt is longer than the context"
    return None


def answer(
    run: Running, text: str, *, start: int, with_logprobs: bool, weight_version: str
) -> bytes:
    """One answer or event with the tokens from ``start`` on; totals are of all."""
    ids = list(run.ids[start:])
    fault = run.fault.kind if run.fault and len(run.ids) > run.fault.after else None
    entries: list[list[Any]] = [
        [p, i, None] for p, i in zip(run.logprobs[start:], ids, strict=True)
    ]
    if fault == "disagree" and entries:
        entries[-1][1] += 1
    if fault == "unknown_id" and entries:
        entries[-1][1] = ids[-1] = 10**6
    if fault == "null" and entries:
        entries[-1][0] = None
    spans = run.spans()
    if fault == "spans":
        spans = [{"version": "0", "start": 0, "end": 0}]
    meta: dict[str, Any] = {
        "id": run.rid,
        "finish_reason": run.finish,
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": len(run.ids),
        "cached_tokens": 0,
        "weight_version": run.versions[-1] if run.versions else weight_version,
        "weight_versions": spans,
        "e2e_latency": 0.001,
    }
    if with_logprobs:
        meta["output_token_logprobs"] = entries
        if run.top:
            tops = run.tops[start:]
            meta["output_top_logprobs"] = [[[p, i, None] for p, i in top] for top in tops]
    event = orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})
    if fault == "nan":
        # As Python's json would write it.
        event = event.replace(str(run.logprobs[-1]).encode(), b"NaN")
    if fault == "garbage":
        event = b'{"meta_info": {}}'
    if fault == "no_json":
        event = b"<html>502 Bad Gateway</html>"
    return event
