"""The client's side of SGLang's HTTP contract: request bodies, engine properties, errors."""

from __future__ import annotations

import hashlib
from typing import Any

import aiohttp
import orjson

from any_agent.engine.base import Capabilities
from any_agent.errors import (
    AnyAgentError,
    ConfigError,
    EngineMismatch,
    EngineUnavailable,
    InvalidRequest,
)
from any_agent.types import GenerationHyperparameters, ModelRequest

JSON_HEADERS = {"Content-Type": "application/json"}
_MAX_SHOWN = 500  # characters of an engine's error message that are passed on


def bearer(key: str | None) -> dict[str, str]:
    """Return the header that carries an engine's key; {} without one."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def generate_body(request: ModelRequest, *, stream: bool) -> bytes:
    """Return the JSON body of one `/generate`; packed ids are written without a copy."""
    body: dict[str, Any] = {
        "rid": request.rid,
        "input_ids": request.input_ids,
        "sampling_params": _sampling(request.gconfig),
        "return_logprob": True,
        "stream": stream,
    }
    if request.top_logprobs:
        body["top_logprobs_num"] = request.top_logprobs
    if request.adapter is not None:
        body["lora_path"] = request.adapter
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


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
    for name in ("min_p", "frequency_penalty", "presence_penalty"):
        if value := getattr(g, name):
            sampling[name] = value
    if g.repetition_penalty != 1:
        sampling["repetition_penalty"] = g.repetition_penalty
    if g.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in g.logit_bias}
    if g.grammar is not None:
        sampling |= _grammar(g.grammar)
    return sampling


def _grammar(text: str) -> dict[str, str]:
    """Return SGLang's parameter for a grammar; a schema or a tag is a string of JSON there."""
    grammar = orjson.loads(text)
    if "structural_tag" in grammar:
        return {"structural_tag": orjson.dumps(grammar["structural_tag"]).decode()}
    if "regex" in grammar:
        return {"regex": grammar["regex"]}
    if grammar.get("json_object"):
        return {"json_schema": '{"type": "object"}'}
    return {"json_schema": orjson.dumps(grammar["json_schema"]).decode()}


def version_number(version: Any) -> int:
    """Return a weight version as a number; ValueError for any other name."""
    # SGLang calls the weights that it was started with "default".
    return 0 if version == "default" else int(version)


def slots_of(info: dict[str, Any]) -> int | None:
    """Return the number of requests that an engine samples at once; None if it is unknown.

    SGLang's start option is often not set; the number that follows from its memory is reported for
    each data-parallel scheduler.
    """
    states = info.get("internal_states")
    states = [state for state in states if isinstance(state, dict)] if states else []
    each = [state.get("effective_max_running_requests_per_dp") for state in states]
    known = [number for number in each if isinstance(number, int) and number > 0]
    if known:
        return sum(known)
    number = info.get("max_running_requests")
    return number if isinstance(number, int) and number > 0 else None


def capabilities_of(info: dict[str, Any]) -> Capabilities:
    """Return an engine's features from its `/server_info`.

    The embedded engine lists them. SGLang has all of them, except grammars without a backend for
    them, structural tags with a backend other than xgrammar, and seeds without deterministic
    inference.
    """
    listed = info.get("capabilities")
    if isinstance(listed, list):
        return Capabilities(**{name: name in listed for name in Capabilities.names()})
    return Capabilities(
        grammar=info.get("grammar_backend") != "none",
        structural_tag=info.get("grammar_backend", "xgrammar") == "xgrammar",
        seed=info.get("enable_deterministic_inference") is True,
    )


async def failure(response: aiohttp.ClientResponse) -> AnyAgentError:
    """Return the error of a response with a status other than 200."""
    raw = await response.read()
    return refusal(response.status, _error_in(raw))


def refusal(status: Any, given: Any) -> AnyAgentError:
    """Return the error that an engine reports: an object with a message, as OpenAI's, or a text.

    A grammar's error has the parameter ``grammar``, which the caller maps to the agent's parameter.
    """
    error = given if isinstance(given, dict) else {"message": given}
    message = _message_of(error)
    if status == 401:
        return EngineUnavailable(WRONG_KEY, retry_after=2)
    if error.get("code") == EngineMismatch.default_code:
        return EngineMismatch(message)
    if status == 400:
        param = error.get("param")
        if param is None and "grammar" in message.lower():
            param = "grammar"  # SGLang names no parameter
        shown = str(param)[:64] if param is not None else None
        return InvalidRequest(f"the engine refused the request: {message}", param=shown)
    return EngineUnavailable(f"the engine answered {status}: {message}", retry_after=2)


def describe(answer: Any) -> str:
    """Return the size and digest of an answer that cannot be read.

    It is quoted nowhere, because it may hold a conversation, which must reach no log.
    """
    raw = answer if isinstance(answer, bytes) else orjson.dumps(answer)
    return f"{len(raw)} bytes, sha256 {hashlib.sha256(raw).hexdigest()[:16]}"


def _error_in(raw: bytes) -> dict[str, Any]:
    """Return the error in a body, with its message; bodies of other forms are described."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, str):
        error = {"message": error}
    return error if isinstance(error, dict) else {"message": f"in an unknown form, {describe(raw)}"}


def _message_of(error: dict[str, Any]) -> str:
    message = error.get("message") or error.get("detail")
    # A validator's detail quotes the request.
    known = isinstance(message, str)
    return str(message)[:_MAX_SHOWN] if known else f"in an unknown form, {describe(error)}"


_TIMEOUT = 30.0
_FULL = (429, 503)
WRONG_KEY = (
    "the engine refuses the key, or needs one (401): set engine.key to the key that it was started "
    "with (SGLang: --api-key); only engines that the service starts have one of the run"
)


class EngineRefused(EngineUnavailable):
    """The engine answered with a status other than 200."""

    answered: int


def refused(status: int, path: str, raw: bytes) -> AnyAgentError:
    if status == 401:
        return ConfigError(WRONG_KEY)
    message = f"the engine answered {path} with {status}: {_message_of(_error_in(raw))}"
    error = EngineRefused(message, retry_after=2)
    error.answered = status
    return error


class EngineBusy(EngineUnavailable):
    """The engine is alive, but takes no call now."""


class SGLangControl:
    """The control requests of one engine, over the connections of ``http``."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url

    async def info(self, kind: str) -> dict[str, Any]:
        """Return `model_info` or `server_info`, under the earlier route names if need be."""
        try:
            return await self.request("GET", f"/{kind}")
        except EngineRefused as error:
            if error.answered != 404:
                raise
        return await self.request("GET", f"/get_{kind}")

    async def knows(self, token: int) -> bool:
        """Return True if the model has this token id; EngineBusy if the engine's queue is full."""
        # This costs almost nothing, and is refused for a bias of an id that is no token.
        sampling = {"max_new_tokens": 1, "ignore_eos": True, "logit_bias": {str(token): 0.0}}
        try:
            body = {"input_ids": [0], "sampling_params": sampling}
            await self.request("POST", "/generate", body)
        except EngineRefused as error:
            if error.answered in _FULL:
                raise EngineBusy(error.message, retry_after=error.retry_after) from None
            if error.answered != 400:
                raise
            return False
        return True

    async def answers(self, path: str, *, within: float) -> bool:
        """Return whether a GET gets any answer in time; EngineUnavailable if nothing listens."""
        try:
            timeout = aiohttp.ClientTimeout(total=within)
            async with self._http.get(self._url + path, timeout=timeout) as response:
                await response.read()
        except TimeoutError:
            return False
        except aiohttp.ClientError as error:
            raise EngineUnavailable("the inference engine is gone", retry_after=2) from error
        return True

    async def request(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, limit: float = _TIMEOUT
    ) -> dict[str, Any]:
        """Return the JSON object of the answer, {} for anything else.

        Raises EngineRefused for a status other than 200, ConfigError for a wrong key,
        EngineUnavailable without an answer.
        """
        timeout = aiohttp.ClientTimeout(total=limit)
        try:
            async with self._http.request(
                method, self._url + path, json=body, timeout=timeout
            ) as response:
                raw = await response.read()
                if response.status != 200:
                    raise refused(response.status, path, raw)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineUnavailable(
                f"the inference engine does not answer ({type(error).__name__}); try again later",
                retry_after=2,
            ) from error
        try:
            data = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return {}
        return data if isinstance(data, dict) else {}
