"""A running service keeps its word to agents: seen over HTTP, in a session of mode eval."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx

from any_agent.chat import format_probes as probes
from any_agent.client.rl_client import RLClient
from any_agent.doctor.verdict import Check, Verdict
from any_agent.errors import AnyAgentError, from_response
from any_agent.protocol.rl import RunInfo, SessionStarted
from any_agent.types import Message

LAW = Check("service")
_DO = "this service breaks its own contract: are its router and its ranks of one version?"
_REACH = (
    "is the service running, is --url right, and is the key an operator's or a tenant's? "
    "An engine is examined with --engine"
)
_TIMEOUT = 60.0
_TTL = 300.0
"""Seconds after which the session ends by itself, should this process be killed."""
_TOKENS = 12
_REASONS = {"stop", "length", "tool_calls"}
_MAX_OVERFLOW = 1 << 18


async def service_laws(url: str, key: str | None) -> tuple[RunInfo | None, list[Verdict]]:
    """What the service says of its run, and the verdicts. The session is aborted at the end."""
    out: list[Verdict] = []
    run: RunInfo | None = None
    async with RLClient(url, admin_key=key, timeout=_TIMEOUT, retry_for=2.0) as client:
        try:
            run = await client.run_info()
            out.append(LAW.passed("answers", f"{run.experiment}/{run.trial}, {run.state}"))
            async with _session(client) as session:
                async for verdict in _ServiceConversation(client, session).verdicts():
                    out.append(verdict)  # noqa: PERF401 - what came before an error counts
        except AnyAgentError as error:
            out.append(LAW.failed("session" if run else "answers", error.message, _REACH))
    return run, out


@asynccontextmanager
async def _session(client: RLClient) -> AsyncIterator[SessionStarted]:
    started = await client.start_session(
        mode="eval", ttl=_TTL, metadata={"opened_for": "any-agent doctor"}
    )
    try:
        yield started
    finally:
        with suppress(AnyAgentError):
            await client.abort(started, "examined by any-agent doctor")


class _Broken(Exception):
    """What a call answered is not what was promised."""


class _ServiceConversation:
    """Calls of one session."""

    def __init__(self, client: RLClient, session: SessionStarted) -> None:
        self._client = client
        self._session = session
        self._recorded = 0
        """Calls that were answered."""
        base = session.base_url.rstrip("/")
        if client.url is not None and not base.startswith(client.url):
            # What agents reach may not be what the operator reaches.
            base = f"{client.url}/v1"
        self._base = base
        self._http = httpx.AsyncClient(
            timeout=_TIMEOUT, headers={"Authorization": f"Bearer {session.api_key}"}
        )

    async def verdicts(self) -> AsyncIterator[Verdict]:
        first = [probes.USER]
        answers: dict[str, Any] = {}

        async def plain() -> str:
            answers["plain"] = body = await self._whole({"messages": first, "logprobs": True})
            told = body["choices"][0]["logprobs"]["content"]
            _require_logprobs(told, body["usage"]["completion_tokens"])
            return f"{body['usage']['total_tokens']} tokens, their log-probabilities and usage"

        async def streamed() -> str:
            return await self._streamed({"messages": first, "logprobs": True})

        async def next_turn() -> str:
            return await self._next_turn(first, answers["plain"])

        async def tools() -> str:
            body = await self._whole({"messages": first, "tools": probes.TOOLS}, may_refuse="tools")
            calls = body["choices"][0]["message"].get("tool_calls") or []
            for call in calls:
                if not isinstance(call["function"]["arguments"], str):
                    raise _Broken("a call's arguments are no text")
            return f"taken; {len(calls)} calls came of them"

        async def stop() -> str:
            return await self._stop(first)

        async with self._http:
            for case, check in (
                ("whole answer", plain),
                ("stream", streamed),
                ("next turn", next_turn),
                ("tools", tools),
                ("stop string", stop),
                ("refusals", self._refusals),
                ("record", self._record),
                ("end of a session", self._end),
            ):
                yield await _verdict(case, check)

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        body = {"model": "policy", "max_tokens": _TOKENS, **body}
        try:
            return await self._http.post(f"{self._base}/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise _Broken(f"no answer within {_TIMEOUT:g} s ({type(error).__name__})") from error

    async def _whole(
        self, body: dict[str, Any], *, may_refuse: str | None = None
    ) -> dict[str, Any]:
        response = await self._post(body)
        if may_refuse is not None and _code_of(response) == "unsupported_parameter":
            raise _Declined(_error_of(response))
        if response.status_code != 200:
            raise _Broken(_error_of(response))
        self._recorded += 1
        answer: dict[str, Any] = response.json()
        self._require_headers(response.headers, answer["id"])
        usage, choice = answer["usage"], answer["choices"][0]
        _require_usage(usage)
        if choice["finish_reason"] not in _REASONS:
            raise _Broken(f"the finish reason is {choice['finish_reason']!r}")
        return answer

    async def _streamed(self, body: dict[str, Any]) -> str:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await self._post({**body, **options})
        if response.status_code != 200:
            raise _Broken(_error_of(response))
        self._recorded += 1
        lines = [line for line in response.text.split("\n\n") if line]
        if lines[-1:] != ["data: [DONE]"]:
            raise _Broken("the stream ends without [DONE]")
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        self._require_headers(response.headers, events[0]["id"])
        choices = [choice for event in events for choice in event["choices"]]
        reasons = [c["finish_reason"] for c in choices if c["finish_reason"] is not None]
        if len(reasons) != 1 or reasons[0] not in _REASONS:
            raise _Broken(f"the stream's finish reasons are {reasons}")
        usage = events[-1].get("usage")
        if not usage:
            raise _Broken("the usage that was asked for is not in the last event")
        _require_usage(usage)
        told = [t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
        _require_logprobs(told, usage["completion_tokens"])
        return f"{len(events)} events, usage and [DONE]"

    async def _next_turn(self, first: list[Message], one: dict[str, Any]) -> str:
        said = one["choices"][0]["message"]
        two = await self._whole({"messages": [*first, said, probes.NEXT]})
        before = one["usage"]["total_tokens"]
        prompt = two["usage"]["prompt_tokens"]
        if prompt <= before:
            raise _Declined(
                f"the next prompt has {prompt} tokens, fewer than the {before} before: rendered "
                "anew (model.thinking_retention?)"
            )
        return f"{prompt} tokens, room for the {before} before: fits an exact continuation"

    async def _stop(self, first: list[Message]) -> str:
        greedy = {"messages": first, "temperature": 0, "max_tokens": 24}
        text = (await self._whole(greedy))["choices"][0]["message"]["content"] or ""
        inner = text[len(text) // 3 :]
        stop = next((c for c in inner if c.isalnum() and text.index(c) >= len(text) // 3), None)
        if stop is None:
            raise _Unseen("no letter or digit was said that could end the answer")
        choice = (await self._whole({**greedy, "stop": [stop]}))["choices"][0]
        again = choice["message"]["content"] or ""
        if stop in again:
            raise _Broken(f"{stop!r} was to end the answer, and is in it: {again!r}")
        if choice["finish_reason"] != "stop":
            raise _Unseen(f"{stop!r} was not said a second time")
        return f"ended before {stop!r}"

    async def _refusals(self) -> str:
        user = [probes.USER]
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        cases: list[tuple[dict[str, Any], str | None]] = [
            ({"messages": user, "modalities": ["audio"]}, "unsupported_parameter"),
            ({"messages": [{"role": "user", "content": [image]}]}, None),
            ({"messages": []}, None),
        ]
        context = await self._context()
        if context is not None and context <= _MAX_OVERFLOW:
            long = {"role": "user", "content": "1 " * context}
            cases.append(({"messages": [long]}, "context_length_exceeded"))
        for body, code in cases:
            response = await self._post(body)
            found = _code_of(response)
            if response.status_code != 400 or (code is not None and found != code):
                what = code or "an empty list of messages, or an image,"
                raise _Broken(f"{what} is answered with {response.status_code} ({found})")
        return f"{len(cases)} bad requests get 400 with the reason"

    async def _context(self) -> int | None:
        try:
            told = (await self._http.get(f"{self._base}/models")).json()["data"]
            return int(told[0]["context_length"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None

    async def _record(self) -> str:
        info = await self._client.session_details(self._session.session_id)
        if (info.mode, info.state) != ("eval", "open"):
            raise _Broken(f"the session is {info.state}, of mode {info.mode}")
        if info.interactions != self._recorded:
            raise _Broken(
                f"{self._recorded} calls were answered, and {info.interactions} are recorded"
            )
        return f"{info.interactions} calls, versions {info.first_version} to {info.last_version}"

    async def _end(self) -> str:
        ended = await self._client.abort(self._session, "examined by any-agent doctor")
        if ended.state != "aborted":
            raise _Broken(f"the session was aborted, and is {ended.state}")
        response = await self._post({"messages": [probes.USER]})
        if response.status_code != 410:
            raise _Broken(f"a call after the end gets {response.status_code}, not 410")
        return "aborted; a late call gets 410"

    def _require_headers(self, headers: httpx.Headers, id: str) -> None:
        wanted = {
            "x-any-agent-interaction": id,
            "x-any-agent-session": self._session.session_id,
        }
        for name, value in wanted.items():
            if headers.get(name) != value:
                raise _Broken(f"the header {name} is {headers.get(name)!r}, not {value!r}")
        version = headers.get("x-any-agent-version", "")
        if not version.isdecimal():
            raise _Broken(f"the header x-any-agent-version is {version!r}")


class _Declined(Exception):
    pass


class _Unseen(Exception):
    pass


async def _verdict(case: str, check: Any) -> Verdict:
    try:
        return LAW.passed(case, await check())
    except _Declined as error:
        return LAW.declined(case, str(error))
    except _Unseen as error:
        return LAW.unchecked(case, str(error))
    except _Broken as error:
        return LAW.failed(case, str(error), _DO)
    except AnyAgentError as error:
        return LAW.failed(case, error.message, _DO)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return LAW.failed(case, f"the answer has another form ({error!r})", _DO)


def _require_usage(usage: dict[str, Any]) -> None:
    prompt, output, total = (
        usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    if prompt < 1 or output < 0 or prompt + output != total:
        raise _Broken(f"the usage {prompt} + {output} = {total} cannot be")


def _require_logprobs(told: list[dict[str, Any]], tokens: int) -> None:
    if len(told) != tokens:
        raise _Broken(f"{len(told)} log-probabilities for {tokens} tokens")
    if not all(-math.inf < each["logprob"] <= 1e-3 for each in told):
        raise _Broken("a log-probability is above 0, or not finite")


def _error_of(response: httpx.Response) -> str:
    error = from_response(response.status_code, response.content, None)
    return f"{response.status_code} {error.code}: {error.message}"


def _code_of(response: httpx.Response) -> str | None:
    return from_response(response.status_code, response.content, None).code
