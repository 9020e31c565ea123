"""The operator's and the trainer's routes over all ranks: reads are merged, writes go to all."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import orjson
from aiohttp import web

from any_agent.errors import AnyAgentError, ServiceUnavailable
from any_agent.protocol.rl import AFTER_HEADER, UNREACHABLE_HEADER, read_places, write_places
from any_agent.protocol.tasks import NextTask
from any_agent.rewards.next_task import draw, merged
from router.body import RequestBody
from router.forward import Forwarder
from router.open_session import MAX_BYTES
from router.upstream import UpstreamResponse

READ_TIMEOUT = 10.0
_WRITE_TIMEOUT = 60.0  # longer than a rank waits for its engine
_LAST_PAGE = 1  # no session has a lower number

Handler: TypeAlias = Callable[[web.BaseRequest, RequestBody], Awaitable[web.StreamResponse]]
Answers: TypeAlias = dict[int, Any]
"""Each rank's JSON."""


class FanOut:
    """Routes that concern every rank. A rank that is away is not waited for, but named."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._ranks = forwarder.ranks
        self._forwarder = forwarder
        by_version = self._merged(lowest_version)
        self.routes: dict[tuple[str, str], Handler] = {
            ("GET", "/rl/v1/sessions"): self.sessions,
            ("GET", "/rl/v1/tasks/next"): self.next_task,
            ("GET", "/rl/v1/capacity"): self._merged(sums),
            ("PUT", "/rl/v1/capacity"): self._merged(sums),
            ("GET", "/rl/v1/run"): by_version,
            ("PUT", "/rl/v1/run"): by_version,
            ("GET", "/rl/v1/version"): by_version,
            ("POST", "/rl/v1/version"): by_version,
            ("POST", "/rl/v1/pause"): by_version,
            ("POST", "/rl/v1/resume"): by_version,
        }

    def _merged(self, merge: Callable[[Answers], dict[str, Any]]) -> Handler:
        """Return the handler that answers with all ranks' answers as one, and with each of them."""

        async def handler(request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
            answers = await self._ask_all(request, await body.read(MAX_BYTES))
            refusal = refusal_of(answers)
            if refusal is not None:
                return await self._forwarder.answer_with(request, refusal)
            successes = _successes(answers)
            each = {str(rank): _json(answer) for rank, answer in sorted(answers.items())}
            data = {**merge(successes), "ranks": each, "unreachable": self._missing(successes)}
            return await self._forwarder.replies.json(request, data)

        return handler

    async def sessions(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """Answer with a list, as one rank does; a header names the ranks that are missing in it."""
        answers = await self._ask_all(request, b"")
        refusal = refusal_of(answers)
        if refusal is not None:
            return await self._forwarder.answer_with(request, refusal)
        headers = self._headers(_successes(answers))
        query = dict(parse_qsl(request.raw_path.partition("?")[2]))
        shown, after = merged_sessions(answers, query)
        if after is not None:
            headers[AFTER_HEADER] = after
        return await self._forwarder.replies.json(request, shown, headers=headers)

    async def next_task(self, request: web.BaseRequest, body: RequestBody) -> web.StreamResponse:
        """Answer with the task to run next by what all ranks know; a header names the ranks whose
        part is missing. A rank that knows no task refuses, and has no part.

        ServiceUnavailable if no rank knows one and not all were asked.
        """
        answers = await self._ask_all(request, b"")
        known = _successes(answers)
        refused = [rank for rank, answer in answers.items() if answer.status == 404]
        if not known:
            others = {rank: one for rank, one in answers.items() if rank not in refused}
            refusal = refusal_of(others) if others else None
            if refusal is None and (missing := self._missing(refused)):
                raise ServiceUnavailable(
                    "the ranks that are up know no task, and these are away: "
                    f"{', '.join(map(str, missing))}; name the tasks to choose from, or try again",
                    retry_after=2,
                )
            return await self._forwarder.answer_with(request, refusal or answers[min(refused)])
        facts = merged(NextTask.model_validate(answer).candidates for answer in known.values())
        headers = self._headers([*known, *refused])
        data = draw(facts).model_dump(mode="json")
        return await self._forwarder.replies.json(request, data, headers=headers)

    def _headers(self, answered: Iterable[int]) -> dict[str, str]:
        missing = self._missing(answered)
        return {UNREACHABLE_HEADER: ",".join(map(str, missing))} if missing else {}

    async def _ask_all(
        self, request: web.BaseRequest, content: bytes
    ) -> dict[int, UpstreamResponse]:
        """Return the answers of the ranks; ServiceUnavailable if none answers."""

        async def ask(rank: int) -> UpstreamResponse | None:
            try:
                async with asyncio.timeout(
                    READ_TIMEOUT if request.method == "GET" else _WRITE_TIMEOUT
                ):
                    return await self._forwarder.ask(request, rank, content=content)
            except (AnyAgentError, TimeoutError):
                return None

        answers = await asyncio.gather(*map(ask, self._ranks.live))
        found = {answer.rank: answer for answer in answers if answer is not None}
        if not found:
            raise ServiceUnavailable("no rank of the service is up; try again", retry_after=2)
        return found

    def _missing(self, answered: Iterable[int]) -> list[int]:
        return sorted(set(self._ranks.fleet.ranks) - set(answered))


def _successes(answers: dict[int, UpstreamResponse]) -> Answers:
    return {rank: _json(answer) for rank, answer in answers.items() if answer.status < 300}


def _json(answer: UpstreamResponse) -> Any:
    """Return an answer's JSON, or its text if the rank failed below its error handling."""
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return answer.body.decode(errors="replace")


def refusal_of(answers: dict[int, UpstreamResponse]) -> UpstreamResponse | None:
    """Return the answer to pass on as it is: a rank's 4xx, or an error if no rank succeeded."""
    in_order = [answers[rank] for rank in sorted(answers)]
    for answer in in_order:
        if 400 <= answer.status < 500:
            return answer
    return in_order[0] if all(answer.status >= 300 for answer in in_order) else None


def merged_sessions(
    answers: dict[int, UpstreamResponse], query: Mapping[str, str]
) -> tuple[list[Any], str | None]:
    """Return the sessions of all ranks' pages as one page, and the `after` of the next one."""
    lists = _successes(answers)
    ends = {
        rank: read_places(answers[rank].headers.get(AFTER_HEADER, "")).get(rank) for rank in lists
    }
    # The ranks accepted the limit as a whole number, and 5.0 is one.
    limit = int(float(query.get("limit", 100)))
    shown, places = newest(lists, ends, read_places(query.get("after", "")), limit)
    return shown, None if places is None else write_places(places)


def sums(answers: Answers) -> dict[str, int]:
    """Return the sums of all ranks' counts, by name."""
    totals: dict[str, int] = {}
    for answer in answers.values():
        for name, value in answer.items():
            if isinstance(value, int):
                totals[name] = totals.get(name, 0) + value
    return totals


def lowest_version(answers: Answers) -> dict[str, Any]:
    """Return the answer of the rank that is furthest behind: all have reached its version."""
    return dict(min(answers.values(), key=lambda answer: answer["version"]))


def newest(
    answers: Answers, ends: Mapping[int, int | None], given: Mapping[int, int], limit: int
) -> tuple[list[Any], dict[int, int] | None]:
    """Return all ranks' sessions, newest first, and the start of the next page; None: the last one.

    ``ends`` has the start of each rank's own next page, ``given`` of this page. A rank that did not
    answer is asked for the same page again.
    """
    lists = [[(rank, session) for session in answer] for rank, answer in answers.items()]
    in_order = heapq.merge(*lists, key=lambda item: item[1]["created_at"], reverse=True)
    shown = list(islice(in_order, limit))
    places = dict(given)
    more = False
    for rank, answer in answers.items():
        of_rank = [session for owner, session in shown if owner == rank]
        if len(of_rank) < len(answer):
            more = True
            if of_rank:
                places[rank] = of_rank[-1]["number"]
        else:
            end = ends.get(rank)
            more = more or end is not None
            places[rank] = _LAST_PAGE if end is None else end
    return [session for _, session in shown], places if more else None
