"""A session around an agent's code: opened when it begins, ended when it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from pydantic import ValidationError

from any_agent.client.rl_client import RLClient
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    InvalidRequest,
    SessionClosed,
    Unprocessable,
)
from any_agent.protocol.rl import RewardSet, SessionInfo, SessionStarted, StartSession
from any_agent.rewards.returned import give_rewards, rewards_of
from any_agent.sdk import clients
from any_agent.sdk import session_context as ambient
from any_agent.sdk.find_service import (
    ServiceAddress,
    borrow_client,
    borrowed,
    find_service,
    return_client,
)
from any_agent.sdk.heartbeats import heartbeats
from any_agent.sdk.http_patches import patches
from any_agent.sdk.open_session import open_session
from any_agent.sdk.opened import SessionBase
from any_agent.sdk.sdk_thread import sdk_thread, wait_for

if TYPE_CHECKING:
    import anthropic
    import openai

log = logging.getLogger(__name__)
T = TypeVar("T")

Reward: TypeAlias = float | dict[str, float]
"""A number, or several by name."""
OnMissingReward: TypeAlias = Literal["raise", "abort", "await"]

_ABORTS_TIMEOUT = 5.0
"""Seconds. A session that could not be aborted expires."""


class AsyncSession(SessionBase):
    """An open session. Methods raise the AnyAgentError that the service answered."""

    def __init__(
        self, service: ServiceAddress, started: SessionStarted, *, retry_for: float
    ) -> None:
        super().__init__(service, started)
        self._retry_for = retry_for
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self.ended = False
        """Whether its end was asked for: leaving it changes nothing any more."""
        self._membership: ambient.Membership | None = None

    @property
    def blocking(self) -> Session:
        """The same session for code in other threads: its methods block them."""
        return Session(self)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """A client whose calls are the session's, wherever it is used; ``options`` as OpenAI's.

        ConfigError if the package openai is not installed.
        """
        return clients.openai_async(self.url, self.api_key, options)

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """A client whose calls are the session's, wherever it is used; ``options`` as Anthropic's.

        ConfigError if the package anthropic is not installed.
        """
        return clients.anthropic_async(self.url, self.api_key, options)

    async def set_reward(self, reward: Reward, completion_id: str | None = None) -> RewardSet:
        """Of one completion or response, by its id; by default of the last one. The same again
        replaces it."""
        async with self._client() as client:
            return await client.set_reward(
                self.api_key, reward, completion_id=completion_id, session_id=self.session_id
            )

    async def set_final_reward(self, reward: Reward) -> RewardSet:
        """Of the whole session; can be revised until a trainer has it."""
        async with self._client() as client:
            return await client.set_final_reward(self.api_key, reward, session_id=self.session_id)

    async def set_returned(self, returned: Any, name: str = "the agent") -> None:
        """Set what an agent's function of this name returned: a number (of the last completion), a
        dict (by completion id), or None (nothing).

        AgentFailed for anything else, for an id that is not the session's, and for a reward where
        no call was made.
        """
        await give_rewards(
            rewards_of(returned, name),
            name,
            self.set_reward,
            no_call=f"{name} returned a reward and made no call: {self._no_calls()}",
        )

    async def finalize(
        self,
        final_reward: Reward | None = None,
        *,
        await_reward: bool = False,
        deadline: float | None = None,
        idempotency_key: str | None = None,
    ) -> SessionInfo:
        """End it: it is trained on as it is. Unprocessable without a reward, or without a call.

        ``await_reward``: end its calls only, and wait ``deadline`` seconds for its reward (default:
        as long as the service allows). ``idempotency_key``: under which it may be asked again.
        """
        try:
            async with self._client() as client:
                info = await client.finalize(
                    self.api_key,
                    final_reward,
                    await_reward=await_reward,
                    deadline=deadline,
                    session_id=self.session_id,
                    idempotency_key=idempotency_key,
                )
        except Unprocessable as error:
            if error.code != "no_interactions":
                raise
            raise Unprocessable(
                f"session {self.session_id} has no call: {self._no_calls()}", code=error.code
            ) from error
        self.ended = True
        return info

    async def abort(
        self, reason: str = "aborted by its agent", *, keep_place: bool = False
    ) -> SessionInfo:
        """Throw it away: nothing of it is trained on.

        ``keep_place``: another session may take its place in its group, which is one smaller
        otherwise.
        """
        async with self._client() as client:
            info = await client.abort(self._started, reason[:200], keep_place=keep_place)
        self.ended = True
        return info

    async def info(self) -> SessionInfo:
        """What has become of it."""
        async with self._client() as client:
            return await client.session_info(self.session_id, self.api_key)

    @property
    def asked_to_end(self) -> bool:
        """True if a method, or a client that has joined it, asked it to end."""
        return self.ended or (self._membership is not None and self._membership.asked_to_end)

    async def over(self) -> SessionInfo | None:
        """What has become of it, if somebody has ended it; None while it is open, and if its time
        ran out."""
        info = await self.info()
        if info.state in ("open", "expired"):
            return None
        self.ended = True
        return info

    def detach(self) -> None:
        """Leave it open for somebody else to end: leaving it changes nothing then."""
        self.ended = True

    # ------------------------------------------------------------------------------------------

    def _client(self) -> AbstractAsyncContextManager[RLClient]:
        """That of the event loop that asks, also of another one than the session's."""
        return borrowed(self._service, retry_for=self._retry_for)

    def _no_calls(self) -> str:
        return (
            f"none came to {self.base_url} with its key; give the client session.base_url and "
            "session.api_key, or use it with exactly this URL inside of the session"
        )


class Session(SessionBase):
    """An open session, for code that blocks. Methods are those of :class:`AsyncSession`."""

    def __init__(self, session: AsyncSession) -> None:
        super().__init__(session._service, session._started)
        self._session = session

    @property
    def ended(self) -> bool:
        return self._session.ended

    def openai(self, **options: Any) -> openai.OpenAI:
        return clients.openai_sync(self.url, self.api_key, options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        return clients.anthropic_sync(self.url, self.api_key, options)

    def set_reward(self, reward: Reward, completion_id: str | None = None) -> RewardSet:
        return self._wait(self._session.set_reward(reward, completion_id), "set_reward")

    def set_final_reward(self, reward: Reward) -> RewardSet:
        return self._wait(self._session.set_final_reward(reward), "set_final_reward")

    def set_returned(self, returned: Any, name: str = "the agent") -> None:
        self._wait(self._session.set_returned(returned, name), "set_returned")

    def finalize(
        self,
        final_reward: Reward | None = None,
        *,
        await_reward: bool = False,
        deadline: float | None = None,
        idempotency_key: str | None = None,
    ) -> SessionInfo:
        ending = self._session.finalize(
            final_reward,
            await_reward=await_reward,
            deadline=deadline,
            idempotency_key=idempotency_key,
        )
        return self._wait(ending, "finalize")

    def abort(
        self, reason: str = "aborted by its agent", *, keep_place: bool = False
    ) -> SessionInfo:
        return self._wait(self._session.abort(reason, keep_place=keep_place), "abort")

    def info(self) -> SessionInfo:
        return self._wait(self._session.info(), "info")

    def detach(self) -> None:
        self._session.detach()

    def _wait(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        forked = self._session._process != os.getpid()
        loop = sdk_thread().loop if forked else self._session._loop
        return wait_for(coroutine, loop, what=f"session.{what}")


class AgentSession:
    """``async with AgentSession("task-1") as session`` gives an :class:`AsyncSession`, ``with`` a
    :class:`Session` that blocks.

    Left normally it is finalized, unless somebody has ended it; left by an exception it is aborted,
    unless it was finalized. Inside, unmodified aiohttp, httpx, httpx2 and requests clients that
    call the service make their calls in it, in this task or thread and in those that copy its
    context.

    ``url`` and ``api_key`` are by default those of the environment (`find_service`). Fields of
    :class:`any_agent.protocol.StartSession`: ``task_id``, ``group_id``, ``group_size``, ``mode``,
    ``metadata``, ``version``, ``ttl`` (seconds). ``wait``: seconds to wait for a slot.
    ``retry_for``: seconds to try again while the service is away (default: 60; 900 where its URL
    stands in a file, as it may be moving). ``idempotency_key``: whoever has opened a session with
    it before gets that one again. ``on_missing_reward``: what leaving it
    normally without any reward does: raise (and abort), abort, or await the reward, which somebody
    else gives then.
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
        url: str | None = None,
        api_key: str | None = None,
        wait: float = 300.0,
        retry_for: float | None = None,
        idempotency_key: str | None = None,
        on_missing_reward: OnMissingReward = "raise",
    ) -> None:
        """ConfigError if no service is named, or its key is no key that opens sessions;
        InvalidRequest for a field that no service takes."""
        self.service = find_service(url, api_key)
        self._fields: dict[str, Any] = {
            "task_id": task_id,
            "group_id": group_id,
            "group_size": group_size,
            "mode": mode,
            "metadata": metadata or {},
            "version": version,
            "ttl": ttl,
        }
        _check(self._fields)
        self._wait = wait
        self._retry_for = self.service.patience if retry_for is None else retry_for
        self._idempotency_key = idempotency_key
        self._on_missing_reward = on_missing_reward
        self._opening = False
        self._session: AsyncSession | None = None
        self._membership: ambient.Membership | None = None

    async def __aenter__(self) -> AsyncSession:
        session = await self._open()
        self._join(session)
        return session

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
                within=self._wait + self._retry_for + 120,
            )
            self._join(session)
        except BaseException as error:
            # Ctrl-C, just as it was open.
            if before is None and self._session is not None:
                wait_for(self._close(error), sdk_thread().loop, what="leaving the session")
            raise
        return session.blocking

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if sys.is_finalizing():
            # Of a generator that nobody ended: there is no thread any more that could end it.
            return
        self._leave()
        if self._is_ours:
            wait_for(self._close(error), sdk_thread().loop, what="leaving the session")

    @property
    def _is_ours(self) -> bool:
        """Whether it is this process that ends it: one that was forked off in the session leaves it
        to its parent."""
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
            raise RuntimeError("this AgentSession was used already: make another one")
        self._opening = True
        client = borrow_client(self.service, retry_for=self._retry_for)
        try:
            started = await open_session(
                client,
                self.service,
                self._fields,
                wait=self._wait,
                idempotency_key=self._idempotency_key,
            )
        except BaseException:
            await return_client(self.service, retry_for=self._retry_for)
            raise
        finally:
            self._opening = False
        self._session = AsyncSession(self.service, started, retry_for=self._retry_for)
        heartbeats().add(self.service, started)
        return self._session

    async def _close(self, error: BaseException | None) -> None:
        session = self._session
        assert session is not None
        try:
            if session.ended:
                return
            if error is not None:
                await self._put_away(session, f"its agent raised {type(error).__name__}")
                return
            try:
                await self._end(session)
            except BaseException as refused:
                await self._put_away(session, f"not finalized: {_kind(refused)}")
                raise
        finally:
            heartbeats().remove(session._started)
            await return_client(self.service, retry_for=self._retry_for)

    async def _end(self, session: AsyncSession) -> None:
        by_agent = session.asked_to_end
        if by_agent and await session.over() is not None:
            return
        try:
            await session.finalize(await_reward=self._on_missing_reward == "await")
        except (SessionClosed, Conflict, Unprocessable) as error:
            over = await session.over()
            # Somebody else's abort must not pass for an end of the agent's.
            if over is not None and (by_agent or over.state != "aborted"):
                return
            if error.code != "no_reward" or self._on_missing_reward != "abort":
                raise
            await session.abort("it was given no reward")

    async def _put_away(self, session: AsyncSession, reason: str) -> None:
        """Nobody may wait long for it: a session that nobody ends expires."""
        try:
            async with asyncio.timeout(_ABORTS_TIMEOUT):
                await session.abort(reason)
        except (AnyAgentError, TimeoutError) as error:
            log.info("session %s is left as it is: %s", session.session_id, error)


def _kind(error: BaseException) -> str:
    return error.code if isinstance(error, AnyAgentError) else type(error).__name__


def _check(fields: dict[str, Any]) -> None:
    try:
        StartSession(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the session"
        raise InvalidRequest(f"{where}: {first['msg']}", param=where) from None
