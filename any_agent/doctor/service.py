"""The laws of a running service, checked over HTTP in a session of mode eval."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx

from any_agent.chat import format_probes as probes
from any_agent.client.rl_client import RLClient
from any_agent.doctor.verdict import Check, Declined, Failed, Unchecked, Verdict
from any_agent.errors import AnyAgentError, from_response
from any_agent.protocol.rl import SessionStarted
from any_agent.protocol.training import RunInfo

LAW = Check(
    "service",
    "this service breaks its own contract: do its router and its ranks have one version?",
)
_REACH = (
    "is the service running, is --url right, and is the key an operator's or a tenant's? "
    "To check an engine, use --engine"
)
_TIMEOUT = 60.0
_TTL = 300.0  # seconds after which the session ends if this process is killed
_TOKENS = 12
_REASONS = {"stop", "length", "tool_calls"}
_MAX_OVERFLOW = 1 << 18


async def service_laws(url: str, key: str | None) -> tuple[RunInfo | None, list[Verdict]]:
    """Return the service's run, and the verdicts of a session that is aborted at the end."""
    out: list[Verdict] = []
    run: RunInfo | None = None
    async with RLClient(url, admin_key=key, timeout=_TIMEOUT, retry_for=2.0) as client:
        try:
            run = await client.run_info()
            out.append(LAW.passed("answers", f"{run.experiment}/{run.trial}, {run.state}"))
            async with _session(client) as session:
                async for verdict in _ServiceConversation(client, session).verdicts():
                    out.append(verdict)  # noqa: PERF401 - verdicts before an error count
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
            await client.abort(started, "checked by any-agent doctor")


class _ServiceConversation:
    """Calls of one session; each check returns the observation, or raises CheckEnded."""

    def __init__(self, client: RLClient, session: SessionStarted) -> None:
        self._client = client
        self._session = session
        self._answered = 0
        self._first: dict[str, Any] = {}
        """The first answer."""
        base = session.base_url.rstrip("/")
        if client.url is not None and not base.startswith(client.url):
            # The address for agents may be out of the operator's reach.
            base = f"{client.url}/v1"
        self._base = base
        self._http = httpx.AsyncClient(
            timeout=_TIMEOUT, headers={"Authorization": f"Bearer {session.api_key}"}
        )

    async def verdicts(self) -> AsyncIterator[Verdict]:
        async with self._http:
            for case, check in (
                ("whole answer", self._plain),
                ("stream", self._streamed),
                ("next turn", self._next_turn),
                ("tools", self._tools),
                ("stop string", self._stop),
                ("refusals", self._refusals),
                ("record", self._record),
                ("end of a session", self._end),
            ):
                yield await _verdict(case, check)

    async def _plain(self) -> str:
        self._first = body = await self._answer({"messages": [probes.USER], "logprobs": True})
        entries = body["choices"][0]["logprobs"]["content"]
        _require_logprobs(entries, body["usage"]["completion_tokens"])
        return f"{body['usage']['total_tokens']} tokens, their log-probabilities and usage"

    async def _tools(self) -> str:
        request = {"messages": [probes.USER], "tools": probes.TOOLS}
        body = await self._answer(request, may_refuse="tools")
        calls = body["choices"][0]["message"].get("tool_calls") or []
        if not all(isinstance(call["function"]["arguments"], str) for call in calls):
            raise Failed("a call's arguments are not text")
        return f"accepted; the answer has {len(calls)} calls"

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        body = {"model": "policy", "max_tokens": _TOKENS, **body}
        try:
            return await self._http.post(f"{self._base}/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise Failed(f"no answer within {_TIMEOUT:g} s ({type(error).__name__})") from error

    async def _answer(self, body: dict[str, Any], *, may_refuse: str = "") -> dict[str, Any]:
        """Return the answer to a call; the engine may decline the parameter ``may_refuse``."""
        response = await self._post(body)
        if may_refuse and _code_of(response) == "unsupported_parameter":
            raise Declined(_error_of(response))
        if response.status_code != 200:
            raise Failed(_error_of(response))
        self._answered += 1
        answer: dict[str, Any] = response.json()
        self._require_headers(response.headers, answer["id"])
        usage, choice = answer["usage"], answer["choices"][0]
        _require_usage(usage)
        if choice["finish_reason"] not in _REASONS:
            raise Failed(f"the finish reason is {choice['finish_reason']!r}")
        return answer

    async def _streamed(self) -> str:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = await self._post({"messages": [probes.USER], "logprobs": True, **options})
        if response.status_code != 200:
            raise Failed(_error_of(response))
        self._answered += 1
        # A slow engine's stream has comments between its events.
        lines = [line for line in response.text.split("\n\n") if line and line[0] != ":"]
        if lines[-1:] != ["data: [DONE]"]:
            raise Failed("the stream ends without [DONE]")
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        self._require_headers(response.headers, events[0]["id"])
        choices = [choice for event in events for choice in event["choices"]]
        reasons = [c["finish_reason"] for c in choices if c["finish_reason"] is not None]
        if len(reasons) != 1 or reasons[0] not in _REASONS:
            raise Failed(f"the stream's finish reasons are {reasons}")
        usage = events[-1].get("usage")
        if not usage:
            raise Failed("the requested usage is not in the last event")
        _require_usage(usage)
        entries = [t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]]
        _require_logprobs(entries, usage["completion_tokens"])
        return f"{len(events)} events, usage and [DONE]"

    async def _next_turn(self) -> str:
        answer = self._first["choices"][0]["message"]
        two = await self._answer({"messages": [probes.USER, answer, probes.NEXT]})
        before = self._first["usage"]["total_tokens"]
        prompt = two["usage"]["prompt_tokens"]
        if prompt <= before:
            raise Declined(
                f"the next prompt has {prompt} tokens, fewer than the {before} before: rendered "
                "anew (model.thinking_retention?)"
            )
        return f"{prompt} tokens, room for the {before} before: fits an exact continuation"

    async def _stop(self) -> str:
        greedy = {"messages": [probes.USER], "temperature": 0, "max_tokens": 24}
        text = (await self._answer(greedy))["choices"][0]["message"]["content"] or ""
        inner = text[len(text) // 3 :]
        stop = next((c for c in inner if c.isalnum() and text.index(c) >= len(text) // 3), None)
        if stop is None:
            raise Unchecked("the answer has no letter or digit that could end it")
        choice = (await self._answer({**greedy, "stop": [stop]}))["choices"][0]
        again = choice["message"]["content"] or ""
        if stop in again:
            raise Failed(f"{stop!r} must end the answer, but it is part of it: {again!r}")
        if choice["finish_reason"] != "stop":
            raise Unchecked(f"{stop!r} was not sampled a second time")
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
                raise Failed(f"{what} is answered with {response.status_code} ({found})")
        return f"{len(cases)} bad requests get 400 with the reason"

    async def _context(self) -> int | None:
        try:
            models = (await self._http.get(f"{self._base}/models")).json()["data"]
            return int(models[0]["context_length"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return None

    async def _record(self) -> str:
        info = await self._client.session_details(self._session.session_id)
        if (info.mode, info.state) != ("eval", "open"):
            raise Failed(f"the session is {info.state}, of mode {info.mode}")
        if info.interactions != self._answered:
            raise Failed(
                f"{self._answered} calls were answered, and {info.interactions} are recorded"
            )
        return f"{info.interactions} calls, versions {info.first_version} to {info.last_version}"

    async def _end(self) -> str:
        ended = await self._client.abort(self._session, "checked by any-agent doctor")
        if ended.state != "aborted":
            raise Failed(f"the session was aborted, and is {ended.state}")
        response = await self._post({"messages": [probes.USER]})
        if response.status_code != 410:
            raise Failed(f"a call after the end gets {response.status_code}, not 410")
        return "aborted; a late call gets 410"

    def _require_headers(self, headers: httpx.Headers, id: str) -> None:
        wanted = {
            "x-any-agent-interaction": id,
            "x-any-agent-session": self._session.session_id,
        }
        for name, value in wanted.items():
            if headers.get(name) != value:
                raise Failed(f"the header {name} is {headers.get(name)!r}, not {value!r}")
        version = headers.get("x-any-agent-version", "")
        if not version.isdecimal():
            raise Failed(f"the header x-any-agent-version is {version!r}")


async def _verdict(case: str, check: Any) -> Verdict:
    try:
        return await LAW.judge(case, check())
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return LAW.failed(case, f"the answer has another form ({error!r})")


def _require_usage(usage: dict[str, Any]) -> None:
    prompt, output, total = (
        usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")
    )
    if prompt < 1 or output < 0 or prompt + output != total:
        raise Failed(f"the usage {prompt} + {output} = {total} is inconsistent")


def _require_logprobs(entries: list[dict[str, Any]], tokens: int) -> None:
    if len(entries) != tokens:
        raise Failed(f"{len(entries)} log-probabilities for {tokens} tokens")
    if not all(-math.inf < each["logprob"] <= 1e-3 for each in entries):
        raise Failed("a log-probability is above 0, or not finite")


def _error_of(response: httpx.Response) -> str:
    error = from_response(response.status_code, response.content, None)
    return f"{response.status_code} {error.code}: {error.message}"


def _code_of(response: httpx.Response) -> str | None:
    return from_response(response.status_code, response.content, None).code
