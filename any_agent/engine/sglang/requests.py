"""The JSON of SGLang's HTTP contract as its client sees it: what it sends, what an engine tells."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from any_agent.engine.base import Capabilities
from any_agent.errors import AnyAgentError, EngineMismatch, EngineUnavailable, InvalidRequest
from any_agent.types import GenerationHyperparameters, ModelRequest

_SHOWN = 500
"""Characters of an engine's error that are told."""


def generate_body(request: ModelRequest, *, stream: bool) -> bytes:
    """The JSON of one `/generate`; packed ids are written as they are."""
    body: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "sampling_params": _sampling(request.gconfig),
        "return_logprob": True,
        "stream": stream,
    }
    if request.top_logprobs:
        body["top_logprobs_num"] = request.top_logprobs
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def one_token(*, biased: int) -> dict[str, Any]:
    """A `/generate` that costs nearly nothing, and is refused if ``biased`` is no token id."""
    sampling = {"max_new_tokens": 1, "ignore_eos": True, "logit_bias": {str(biased): 0.0}}
    return {"input_ids": [0], "sampling_params": sampling}


def _sampling(g: GenerationHyperparameters) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "max_new_tokens": g.max_new_tokens,
        "temperature": g.temperature,
        "top_p": g.top_p,
        "top_k": g.top_k,
        "ignore_eos": g.ignore_eos,
    }
    if g.stop:
        sampling["stop"] = list(g.stop)
    if g.stop_token_ids:
        sampling["stop_token_ids"] = list(g.stop_token_ids)
    if g.seed is not None:
        # SGLang heeds it only with --enable-deterministic-inference.
        sampling["sampling_seed"] = g.seed
    if g.min_p:
        sampling["min_p"] = g.min_p
    if g.frequency_penalty:
        sampling["frequency_penalty"] = g.frequency_penalty
    if g.presence_penalty:
        sampling["presence_penalty"] = g.presence_penalty
    if g.repetition_penalty != 1:
        sampling["repetition_penalty"] = g.repetition_penalty
    if g.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in g.logit_bias}
    if g.grammar is not None:
        sampling |= _grammar(g.grammar)
    return sampling


def _grammar(text: str) -> dict[str, str]:
    """SGLang's parameter for a grammar; a schema or a tag is a string of JSON there."""
    grammar = orjson.loads(text)
    if "structural_tag" in grammar:
        return {"structural_tag": orjson.dumps(grammar["structural_tag"]).decode()}
    if "regex" in grammar:
        return {"regex": grammar["regex"]}
    if grammar.get("json_object"):
        return {"json_schema": '{"type": "object"}'}
    return {"json_schema": orjson.dumps(grammar["json_schema"]).decode()}


def version_number(version: Any) -> int:
    """SGLang calls the weights that it was started with "default". ValueError if it is none."""
    return 0 if version == "default" else int(version)


def slots_of(info: dict[str, Any]) -> int | None:
    """Requests that an engine samples at once, from its `/server_info`; None if untold.

    What SGLang was started with is often not set; what follows from its memory it tells of each of
    its data-parallel schedulers.
    """
    states = info.get("internal_states")
    states = [state for state in states if isinstance(state, dict)] if states else []
    each = [state.get("effective_max_running_requests_per_dp") for state in states]
    known = [number for number in each if isinstance(number, int) and number > 0]
    if known:
        return sum(known)
    told = info.get("max_running_requests")
    return told if isinstance(told, int) and told > 0 else None


def capabilities_of(info: dict[str, Any]) -> Capabilities:
    """What an engine can do, from its `/server_info`.

    The embedded engine lists it. SGLang can do all but grammars without a backend for them,
    those of several parts with another one than xgrammar, and seeds without deterministic
    inference.
    """
    told = info.get("capabilities")
    if isinstance(told, list):
        return Capabilities(**{name: name in told for name in Capabilities.names()})
    return Capabilities(
        grammar=info.get("grammar_backend") != "none",
        structural_tag=info.get("grammar_backend", "xgrammar") == "xgrammar",
        seed=info.get("enable_deterministic_inference") is True,
    )


async def failure(response: aiohttp.ClientResponse) -> AnyAgentError:
    """What an answer with another status than 200 means."""
    raw = await response.read()
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        body = {"message": raw[:_SHOWN].decode(errors="replace")}
    return refusal(response.status, body.get("error", body))


def refusal(status: Any, told: Any) -> AnyAgentError:
    """The error that an engine tells: an object with a message, as OpenAI's, or a text.

    A grammar's has the parameter ``grammar``, which is not the agent's name of it.
    """
    error = told if isinstance(told, dict) else {"message": told}
    message = str(error.get("message") or error.get("detail") or told)[:_SHOWN]
    if error.get("code") == EngineMismatch.default_code:
        return EngineMismatch(message)
    if status == 400:
        param = error.get("param")
        if param is None and "grammar" in message.lower():
            param = "grammar"  # SGLang names none
        shown = str(param)[:64] if param is not None else None
        return InvalidRequest(f"the engine refused the request: {message}", param=shown)
    return EngineUnavailable(f"the engine answered {status}: {message}", retry_after=2)
