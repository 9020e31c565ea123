"""`AgentSession`: opens a session, and ends it when the agent's code has run."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
import uuid
from contextlib import suppress
from typing import Any, Literal, TypeAlias

from any_agent.client.backoff import RUN_WAIT, wait_for_slot
from any_agent.client.rl_client import RLClient, checked
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    SessionClosed,
    TooManyRequests,
    Unauthenticated,
    Unprocessable,
)
from any_agent.protocol.rl import Rewards, SessionStarted, StartSession
from any_agent.protocol.training import RunInfo
from any_agent.runtime.command_line import one_line_errors
from any_agent.sdk import session_context as ambient
from any_agent.sdk.find_service import ServiceAddress, find_service, shared_client
from any_agent.sdk.http_patches import patches
from any_agent.sdk.sdk_thread import heartbeats, sdk_thread, wait_for
from any_agent.sdk.session import AsyncSession, Session

log = logging.getLogger(__name__)

OnMissingReward: TypeAlias = Literal["raise", "abort", "await"]

_MAX_SERVER_WAIT = 25.0
"""Seconds that one request waits at the service, as proxies cut connections after longer waits."""
_UNDO_TIMEOUT = 3.0
_SILENCE = 2.0
"""Seconds that a process's first opening waits at the service, to learn why it must wait."""
_NOTICE_INTERVAL = 60.0
"""Seconds until the later log lines of a wait, and between two. Short waits are usual, as training
admits no more sessions than it wants."""

asks_early = True
"""False once an opening of this process asks, or has asked, for the reason of its wait."""
next_notice = -math.inf


def _log_wait(
    waited: float, service: ServiceAddress, error: TooManyRequests, *, early: bool = False
) -> None:
    """Log why sessions wait, once a minute for all of them: the reason is the same for all."""
    global next_notice
    now = time.monotonic()
    if early or (waited >= _NOTICE_INTERVAL and now >= next_notice):
        next_notice = now + _NOTICE_INTERVAL
        log.warning(
            "a session has waited %.0f s for a slot at %s: %s", waited, service.named, error.message
        )


class AgentSession:
    """``async with AgentSession("task-1") as session`` gives an :class:`AsyncSession`, ``with`` a
    :class:`Session` that blocks.

    Leaving the block finalizes the session, unless it was ended before; an exception aborts it,
    unless it was finalized. Inside, unmodified aiohttp, httpx, httpx2 and requests clients that
    call the service make their calls in it, in this task or thread and in those that copy its
    context.

    ``url`` and ``api_key`` are by default those of the environment (`find_service`). Fields of
    :class:`any_agent.protocol.StartSession`: ``task_id``, ``group_id``, ``group_size``, ``mode``,
    ``metadata``, ``version``, ``ttl`` (seconds), ``rewards`` (``"judge"``: only this object's
    methods reward the session; the key that the agent gets may not). ``wait``: seconds to wait for
    a slot.
    ``retry_for``: seconds to try again while the service is away (default: 60; 900 where its URL
    stands in a file, as it may be moving). ``idempotency_key``: a repeated open with the same key
    gets the same session again. ``on_missing_reward``: the effect of leaving the block normally
    without any reward: raise (and abort), abort, or await the reward from another caller.
    """

    def __init__(
        self,
        task_id: str | None = None,
        *,
        group_id: str | None = None,
        group_size: int | None = None,
        mode: Literal["train", "eval"] = "train",
        metadata: dict[str, Any] | None = None,
        version: int | Literal["current"] | None = None,
        ttl: float | None = None,
        rewards: Rewards | None = None,
        url: str | None = None,
        api_key: str | None = None,
        wait: float = 300.0,
        retry_for: float | None = None,
        idempotency_key: str | None = None,
        on_missing_reward: OnMissingReward = "raise",
    ) -> None:
        """ConfigError if no service is named, or its key cannot open sessions; InvalidRequest for
        an invalid field."""
        one_line_errors(place=True)
        self.service = find_service(url, api_key)
        self._fields: dict[str, Any] = {
            "task_id": task_id,
            "group_id": group_id,
            "group_size": group_size,
            "mode": mode,
            "metadata": metadata or {},
            "version": version,
            "ttl": ttl,
            "rewards": rewards,
        }
        checked(StartSession, **self._fields)
        self._wait = wait
        self._retry_for = retry_for
        self._idempotency_key = idempotency_key
        self._on_missing_reward = on_missing_reward
        self._opening = False
        self._shared = shared_client(self.service, retry_for=self._retry_for)
        self._session: AsyncSession | None = None
        self._membership: ambient.Membership | None = None

    @property
    def _patience(self) -> float:
        return self.service.patience if self._retry_for is None else self._retry_for

    async def __aenter__(self) -> AsyncSession:
        session = await self._open()
        self._join(session)
        return session

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave()
        if self._is_ours:
            await self._close(error)

    def __enter__(self) -> Session:
        before = self._session
        try:
            session = wait_for(
                self._open(),
                sdk_thread().loop,
                what="with AgentSession(...)",
                within=self._wait + self._patience + RUN_WAIT + 120,
            )
            self._join(session)
        except BaseException as error:
            # Ctrl-C may come just after the session was opened.
            if before is None and self._session is not None:
                wait_for(self._close(error), sdk_thread().loop, what="leaving the session")
            raise
        return session.blocking

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if sys.is_finalizing():
            # A generator was not closed: no thread is left that could end the session.
            return
        self._leave()
        if self._is_ours:
            wait_for(self._close(error), sdk_thread().loop, what="leaving the session")

    @property
    def _is_ours(self) -> bool:
        """True in the process that opened it: a process forked inside the session leaves its end to
        its parent."""
        assert self._session is not None
        return self._session._process == os.getpid()

    # -- in the caller's context ---------------------------------------------------------------

    def _join(self, session: AsyncSession) -> None:
        patches.acquire()
        self._membership = ambient.join(self.service.named, session.api_key)
        session._membership = self._membership

    def _leave(self) -> None:
        assert self._membership is not None
        ambient.leave(self._membership)
        patches.release()

    # -- on the session's event loop -----------------------------------------------------------

    async def _open(self) -> AsyncSession:
        if self._session is not None or self._opening:
            raise RuntimeError("this AgentSession was used already: create another one")
        self._opening = True
        client = await self._shared.__aenter__()
        try:
            started = await open_session(
                client,
                self.service,
                self._fields,
                wait=self._wait,
                idempotency_key=self._idempotency_key,
            )
        except BaseException:
            await self._shared.__aexit__()
            raise
        finally:
            self._opening = False
        judged = self._fields["rewards"] in ("judge", "both")
        self._session = AsyncSession(
            self.service, started, retry_for=self._retry_for, judged=judged
        )
        heartbeats.add(self.service, started)
        return self._session

    async def _close(self, error: BaseException | None) -> None:
        session = self._session
        assert session is not None
        try:
            if session.ended:
                return
            if error is not None:
                await session.abort_quietly(_reason(error))
                return
            try:
                await self._end(session)
            except BaseException as refused:
                code = getattr(refused, "code", type(refused).__name__)
                await session.abort_quietly(f"not finalized: {code}")
                raise
        finally:
            heartbeats.remove(session._started)
            await self._shared.__aexit__()

    async def _end(self, session: AsyncSession) -> None:
        by_agent = session.asked_to_end
        if by_agent and await session.end_state() is not None:
            return
        try:
            await session.finalize(await_reward=self._on_missing_reward == "await")
        except (SessionClosed, Conflict, Unprocessable) as error:
            ended = await session.end_state()
            # Another caller's abort must not pass for an end by the agent.
            if ended is not None and (by_agent or ended.state != "aborted"):
                return
            if error.code != "no_reward" or self._on_missing_reward != "abort":
                raise
            await session.abort("it was given no reward")


async def run_info(client: RLClient, service: ServiceAddress) -> RunInfo:
    """Return the service's run; Unauthenticated names the source of a key that it refuses."""
    try:
        return await client.run_info()
    except Unauthenticated as error:
        raise key_refused(error, service) from None


async def find_run(service: ServiceAddress) -> RunInfo:
    """Return the service's run."""
    async with shared_client(service, retry_for=None) as client:
        return await run_info(client, service)


async def open_session(
    client: RLClient,
    service: ServiceAddress,
    given: dict[str, Any],
    *,
    wait: float,
    idempotency_key: str | None,
) -> SessionStarted:
    """Open a session with the ``given`` fields as soon as there is a slot; TooManyRequests after
    ``wait`` seconds."""
    global asks_early
    # An idempotent request is also recognised by its body, so a caller's key has one wait.
    early = asks_early and idempotency_key is None and wait > _SILENCE
    usual = min(wait, _MAX_SERVER_WAIT)
    asks_early = asks_early and not early

    async def attempt() -> SessionStarted:
        nonlocal early
        # A refusal means that nothing was opened: with another key another rank may be asked.
        key = idempotency_key or uuid.uuid4().hex
        fields = {**given, "wait": _SILENCE if early else usual}
        try:
            return await client.start_session(idempotency_key=key, **fields)
        except Unauthenticated as error:
            raise key_refused(error, service) from None
        except TooManyRequests as error:
            if early:
                early = False
                _log_wait(_SILENCE, service, error, early=True)
            raise
        except asyncio.CancelledError:
            await _undo(client, fields, key, keep_place=idempotency_key is not None)
            raise

    async def log_wait(error: TooManyRequests, waited: float) -> None:
        _log_wait(waited, service, error)

    try:
        return await wait_for_slot(attempt, patience=wait, refused=log_wait)
    finally:
        # It had not to wait: a later one may.
        asks_early = asks_early or early


async def _undo(client: RLClient, fields: dict[str, Any], key: str, *, keep_place: bool) -> None:
    """Abort the session that the service may have opened: the same request returns it at once.

    A caller that chose the key opens again, and takes the place in the group then.
    """
    with suppress(AnyAgentError, TimeoutError):
        async with asyncio.timeout(_UNDO_TIMEOUT):
            started = await client.start_session(idempotency_key=key, **fields)
            await client.abort(started, "its opener was cancelled", keep_place=keep_place)


def key_refused(error: Unauthenticated, service: ServiceAddress) -> Unauthenticated:
    """Return the error with the source of the key in its message."""
    if service.api_key is None:
        message = (
            f"{service.url} requires a key: set ANY_AGENT_API_KEY (or OPENAI_API_KEY) to a "
            "tenant's key (any-agent keys create --scope tenant), or pass it as api_key= "
            "(commands: --api-key-file)"
        )
    else:
        message = (
            f"{service.url} refuses the key of {service.key_from}: {error.message}; it must "
            "be a tenant's or an admin's (any-agent keys create --scope tenant, on the "
            "service's machine)"
        )
    return Unauthenticated(message, code=error.code)


def _reason(error: BaseException) -> str:
    """Return why an agent's block ended without a result."""
    if isinstance(error, asyncio.CancelledError):
        return "its agent was cancelled: by a time limit around it, Ctrl-C, or its own program"
    return f"its agent raised {type(error).__name__}"
