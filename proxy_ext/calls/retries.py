"""Retries that an SDK marks: each gets the answer to the call that it repeats, not a new sample.

Stainless SDKs (OpenAI's, Anthropic's) count in ``x-stainless-retry-count``, 0 at the first try. A
retry joins the oldest call of its session with the same body, the same role and a lower count whose
client is gone; identical bodies that are not retries are separate samples.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from starlette.requests import Request

from any_agent.completions.call_types import choice_ids, completion_of
from any_agent.completions.params.call import ChatCall
from any_agent.completions.parsed_request import ROLE_HEADER
from any_agent.types import Interaction
from proxy_ext.calls.call import Call, Listener, calls_of
from proxy_ext.calls.call_manager import CallManager
from proxy_ext.journal import RequestMark
from proxy_ext.sessions.delivery import UNDELIVERED, was_used
from proxy_ext.sessions.session import RecordedSession

HEADER = "x-stainless-retry-count"
NEWS_SECONDS = 5.0
"""Longest wait of a retry until the client of the call that it repeats is known to have left."""
_COUNT = re.compile(r"[0-9]{1,4}")


def retry_mark(request: Request, body: bytes) -> RequestMark | None:
    """Return what identifies a retry of the request; None if its SDK does not mark retries."""
    count = request.headers.get(HEADER, "")
    if not _COUNT.fullmatch(count):
        return None
    # The same body means something else to another API, and from another of a session's agents.
    sender = " ".join((route_of(request), *request.headers.getlist(ROLE_HEADER)))
    hash = hashlib.blake2b(sender.encode() + b"\0", digest_size=16)
    hash.update(body)
    return RequestMark(hash.digest(), int(count))


def route_of(request: Request) -> str:
    """Return a request's path without the optional `/v1`."""
    return str(request.scope["path"]).removeprefix("/v1")


async def join_retried_call(
    calls: CallManager, session: RecordedSession, mark: RequestMark, again: ChatCall
) -> Listener | None:
    """Return a client of the earlier call that a retry repeats; None if there is none."""
    deadline = time.monotonic() + NEWS_SECONDS
    news = asyncio.Event()
    while True:
        session.require_open()
        if (before := _resume_recorded(calls, session, mark, again)) is not None:
            calls.stats.retries["recovered"] += 1
            return before
        earlier = sorted(
            (c for c in calls_of(session) if _repeats(mark, c)), key=lambda c: c.number
        )
        for call in earlier:
            if call.vacant and not call.failed:
                call.mark = mark
                calls.stats.retries["replayed" if call.answered else "joined"] += 1
                return call.listen()
        remaining = deadline - time.monotonic()
        if not earlier or remaining <= 0:
            calls.stats.retries["new"] += 1
            return None
        await _wait_for_client(news, earlier, remaining)


async def find_retried_session(
    sessions: Callable[[], Sequence[RecordedSession]], mark: RequestMark
) -> RecordedSession | None:
    """Return the session, of several, with a call that the retry repeats and whose client is gone.

    None if no session has such a call. A call whose client may just be leaving is waited for.
    """
    deadline = time.monotonic() + NEWS_SECONDS
    news = asyncio.Event()
    while True:
        repeated: list[Call] = []
        for session in sessions():
            earlier = [c for c in calls_of(session) if _repeats(mark, c) and not c.failed]
            recorded = (e for e in session.unconfirmed.values() if _is_later(mark, e))
            if any(c.vacant for c in earlier) or any(recorded):
                return session
            repeated += earlier
        remaining = deadline - time.monotonic()
        if not repeated or remaining <= 0:
            return None
        await _wait_for_client(news, repeated, remaining)


def _repeats(mark: RequestMark, call: Call) -> bool:
    return call.mark is not None and not call.closed and _is_later(mark, call.mark)


def _is_later(mark: RequestMark, earlier: RequestMark) -> bool:
    return mark.hash == earlier.hash and mark.retry_count > earlier.retry_count


def _resume_recorded(
    calls: CallManager, session: RecordedSession, mark: RequestMark, again: ChatCall
) -> Listener | None:
    """Resume the oldest answer of an earlier process that the retry repeats: all of its choices,
    or none."""
    for id, earlier in session.unconfirmed.items():
        if not _is_later(mark, earlier):
            continue
        completion = completion_of(id) or id
        ids = choice_ids(completion, again.n * max(1, len(again.prompts)))
        choices = [session.tree[each] for each in ids if each in session.tree]
        if len(choices) == len(ids) and not any(_is_settled(session, choice) for choice in choices):
            listener = calls.resume_recorded(completion, choices, session, mark, again)
            for each in ids:
                session.unconfirmed.pop(each, None)
            return listener
    return None


def _is_settled(session: RecordedSession, interaction: Interaction) -> bool:
    """Return whether no retry can need the answer: it was used, or given up as undelivered."""
    return interaction.untrainable_reason == UNDELIVERED or was_used(session, interaction)


async def _wait_for_client(news: asyncio.Event, calls: list[Call], seconds: float) -> None:
    """Wait until one of the calls has lost its client or answered it, or the time is over."""
    news.clear()
    for call in calls:
        call.watchers.add(news)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await news.wait()
    finally:
        for call in calls:
            call.watchers.discard(news)
