"""A service that speaks OpenAI's chat API, asked for answers; everything that it says may be
anything."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import httpx

from any_agent.chat.message_validation import text_of
from any_agent.client.backoff import Backoff
from any_agent.errors import ConfigError, from_response
from any_agent.runtime.command_line import printable
from any_agent.runtime.logs import Redactor
from any_agent.types import Message

KEY_FROM = "OPENAI_API_KEY"
"""The variable that has the key; without it requests have none."""
_MOST_BYTES = 64 << 20  # of one answer
_GIVE_UP = 16
"""Failures in a row after which nothing more is sent, unless they are about single requests."""
_BUSY = (429, 503)
_ABOUT_THE_REQUEST = (400, 413, 422)
_LEAST = -4e38  # the log-probability below which no engine's numbers (float32) are
_ROUNDING = 1e-3  # of engines that compute a log-probability just above 0
_MOST_SAID = 300  # characters of an error that are shown
_OWN_HEADER = "x-any-agent-interaction"
_REPLACED_HEADER = "x-any-agent-overrides"


class CallFailed(Exception):
    """Reports a call without an answer: ``kind`` is counted, ``said`` is what the service said."""

    def __init__(self, kind: str, said: str = "") -> None:
        super().__init__(f"{kind}: {said}" if said else kind)
        self.kind = kind
        self.said = said


class SampledToken(NamedTuple):
    """One token of an answer, as the service spells it."""

    text: str | bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, checked."""

    message: Message
    """Content, and reasoning_content and tool_calls if it has any; arguments are texts."""
    finish_reason: str | None
    prompt_tokens: int | None
    output_tokens: int | None
    tokens: list[SampledToken] | None
    """The sampled tokens; None where the service returned no log-probabilities that can be read."""
    own: bool
    """True for an answer of a service of this kind, which divides logits by the temperature."""
    replaced: tuple[str, ...]
    """The parameters that such a service replaced."""


class Endpoint:
    """One service, with a limit of calls at once and of each call's time; a context manager."""

    def __init__(self, url: str, key: str | None, *, seconds: float, at_once: int) -> None:
        """``url``: as OpenAI's clients take it, `/v1` included. Raises ConfigError."""
        self.url = _base_url(url)
        self.failures: Counter[str] = Counter()
        """The calls without an answer, by kind."""
        self.said: dict[str, str] = {}
        """The words of the service at the first failure of each kind."""
        self.answered = 0
        self._seconds = seconds
        self._room = asyncio.Semaphore(at_once)
        self._in_a_row = 0
        self._logprobs = True
        self._redactor = Redactor([key] if key else [])
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key:
            if not (key.isascii() and key.isprintable()) or " " in key:
                raise ConfigError(f"{KEY_FROM} has a character that no key can have")
            headers["Authorization"] = f"Bearer {key}"
        # Each call has one limit of its own, from its first byte to its last.
        limits = httpx.Limits(max_connections=at_once)
        self._http = httpx.AsyncClient(headers=headers, timeout=None, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def ask(self, body_of: Callable[[], Mapping[str, Any]]) -> Answer:
        """Return the answer to a body, which is made once there is room for the call.

        Raises CallFailed, which is counted, and what ``body_of`` raises.
        """
        async with self._room:
            body = body_of()
            try:
                if self._in_a_row >= _GIVE_UP:
                    raise CallFailed(f"not sent, as the {_GIVE_UP} calls before had no answer")
                async with asyncio.timeout(self._seconds):
                    answer = await self._ask(body)
            except TimeoutError:
                failure = CallFailed(f"no answer within {self._seconds:g} s")
            except httpx.HTTPError as error:
                # Its words may have a header's value.
                failure = CallFailed(f"not reached ({type(error).__name__})")
            except CallFailed as error:
                failure = error
            else:
                self._in_a_row = 0
                self.answered += 1
                return answer
        self._failed(failure)
        raise failure

    def _failed(self, failure: CallFailed) -> None:
        self.failures[failure.kind] += 1
        self.said.setdefault(failure.kind, failure.said)
        if failure.kind not in map(_status_kind, _ABOUT_THE_REQUEST):
            self._in_a_row += 1

    async def _ask(self, body: Mapping[str, Any]) -> Answer:
        asked = self._logprobs
        status, headers, data = await self._post({**body, "logprobs": True} if asked else body)
        if asked and status in _ABOUT_THE_REQUEST and b"logprob" in data:
            # A service, or a model, without log-probabilities still has answers.
            self._logprobs = False
            status, headers, data = await self._post(body)
        if status != 200:
            raise CallFailed(_status_kind(status), self._shown(status, data))
        try:
            return _answer(json.loads(data), headers)
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, _Malformed) else "it is not JSON"
            raise CallFailed("an answer that is no chat completion", why) from None

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, httpx.Headers, bytes]:
        """Post until the service is not busy, as long as there is time for another try."""
        # Agents send lone surrogates, which JSON has only as escapes.
        content = json.dumps(body).encode("ascii")
        backoff = Backoff(self._seconds, first=1.0, longest=30.0)
        while True:
            status, headers, data = await self._once(content)
            if status not in _BUSY:
                return status, headers, data
            # A service that names no time at all is not asked faster than one that is silent.
            named = from_response(status, b"", headers.get("retry-after")).retry_after or 0.0
            if not backoff.allows(max(backoff.delay, named)):
                return status, headers, data
            await backoff.wait(at_least=named)

    async def _once(self, content: bytes) -> tuple[int, httpx.Headers, bytes]:
        url, data = f"{self.url}/chat/completions", bytearray()
        async with self._http.stream("POST", url, content=content) as response:
            async for part in response.aiter_bytes():
                data += part
                if len(data) > _MOST_BYTES:
                    raise CallFailed(f"an answer of more than {_MOST_BYTES >> 20} MiB")
        return response.status_code, response.headers, bytes(data)

    def _shown(self, status: int, data: bytes) -> str:
        """Return what an error says, without the key, which services repeat."""
        message = from_response(status, data, None).message
        return printable(self._redactor.text(message))[:_MOST_SAID]


def _status_kind(status: int) -> str:
    return f"HTTP {status}"


def _base_url(given: str) -> str:
    """Return a URL to which `/chat/completions` is added; ConfigError without any secret."""
    try:
        parsed = httpx.URL(given)
    except (httpx.InvalidURL, ValueError):
        parsed = httpx.URL("")
    # What is before an @ may be a password, whatever else the text is.
    if "@" in given or parsed.query or parsed.fragment or "/sk-" in parsed.path:
        raise ConfigError(
            "--url has an @, or more than a host and a path: others may read it, so put a key "
            f"into {KEY_FROM}"
        )
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            f"--url is {given[:200]!r}, which is no URL of a service: write it like "
            "https://example.com/v1"
        )
    path = parsed.path.rstrip("/")
    return str(parsed.copy_with(path=path or "/v1"))


# -- reading an answer -----------------------------------------------------------------------------


class _Malformed(ValueError):
    """Reports the part of an answer that is not as OpenAI's."""


def _answer(value: Any, headers: httpx.Headers) -> Answer:
    """Check an answer; raises _Malformed."""
    match value:
        case {"choices": [{"message": dict(message)} as choice, *_]}:
            pass
        case _:
            raise _Malformed("it has no choices[0].message")
    reason = choice.get("finish_reason")
    if reason is not None and not isinstance(reason, str):
        raise _Malformed("choices[0].finish_reason is no text")
    usage = value.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Answer(
        _message(message),
        reason,
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        _tokens(choice.get("logprobs")),
        _OWN_HEADER in headers,
        _names(headers.get(_REPLACED_HEADER)),
    )


def _message(given: dict[str, Any]) -> Message:
    content = text_of(given.get("content"))
    if content is None:
        raise _Malformed("choices[0].message.content is no text")
    out: Message = {"role": "assistant", "content": content}
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        out["reasoning_content"] = reasoning
    calls = []
    for call in _list(given.get("tool_calls"), "choices[0].message.tool_calls"):
        match call:
            case {"function": {"name": str(name), "arguments": str(arguments)}}:
                calls.append({"function": {"name": name, "arguments": arguments}})
            case _:
                raise _Malformed("choices[0].message.tool_calls has something other than functions")
    if calls:
        out["tool_calls"] = calls
    return out


def _list(value: Any, name: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise _Malformed(f"{name} is no list")
    return value or []


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _tokens(logprobs: Any) -> list[SampledToken] | None:
    """Return the tokens of a choice's `logprobs`; None for any other form."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        return None
    out = []
    for entry in content:
        match entry:
            # Many writers of JSON have -1.0 as -1; no number is below both limits or NaN.
            case {"token": str(text), "logprob": int() | float() as given} if (
                type(given) is not bool and _LEAST <= given <= _ROUNDING
            ):
                logprob = min(float(given), 0.0)
            case _:
                return None
        spelled = entry.get("bytes")
        try:
            out.append(SampledToken(bytes(spelled) if isinstance(spelled, list) else text, logprob))
        except (TypeError, ValueError):
            return None
    return out


def _names(header: str | None) -> tuple[str, ...]:
    """Return the names in the header that lists replaced parameters."""
    try:
        found = json.loads(header or "{}")
    except (ValueError, RecursionError):
        found = None
    return tuple(map(printable, found)) if isinstance(found, dict) else ("unknown ones",)
