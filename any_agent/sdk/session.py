"""`AgentSession`: a session that is open while an agent's code runs."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from pydantic import ValidationError

from any_agent.client.environment import environment
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
from any_agent.sdk.find_service import ServiceAddress, find_service, shared_client
from any_agent.sdk.heartbeats import heartbeats
from any_agent.sdk.http_patches import patches
from any_agent.sdk.open_session import open_session
from any_agent.sdk.sdk_thread import sdk_thread, wait_for

if TYPE_CHECKING:
    import anthropic
    import openai

log = logging.getLogger(__name__)
T = TypeVar("T")

Reward: TypeAlias = float | dict[str, float]
"""A number, or several by name."""
OnMissingReward: TypeAlias = Literal["raise", "abort", "await"]

_ABORT_TIMEOUT = 5.0
"""Seconds; a session that could not be aborted expires."""


class SessionBase:
    """An opened session's identity and addresses."""

    def __init__(self, service: ServiceAddress, started: SessionStarted) -> None:
        self._service = service
        self._started = started

    @property
    def session_id(self) -> str:
        return self._started.session_id

    @property
    def api_key(self) -> str:
        """The session's own key, which an OpenAI client takes as its API key."""
        return self._started.api_key

    @property
    def url(self) -> str:
        """The service's URL without `/v1`, which Anthropic's clients take as their base URL."""
        return self._service.url

    @property
    def base_url(self) -> str:
        """The service's URL with `/v1`, which OpenAI's clients take as their base URL."""
        return f"{self._service.url}/v1"

    @property
    def session_url(self) -> str:
        """A base URL for OpenAI's clients that names the session, so that any key will do."""
        return f"{self._service.url}/{self.api_key}/v1"

    @property
    def version(self) -> int:
        """The weight version that was served when the session was opened."""
        return self._started.version

    @property
    def mode(self) -> Literal["train", "eval"]:
        return self._started.mode

    @property
    def task_id(self) -> str | None:
        return self._started.task_id

    @property
    def group_id(self) -> str | None:
        return self._started.group_id

    @property
    def expires_in(self) -> float:
        """Seconds from its opening until it expires, whatever happens."""
        return self._started.expires_in

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id} at {self.url}>"

    def env(self) -> dict[str, str]:
        """Return the environment that puts another process's OpenAI and Anthropic clients into the
        session."""
        return environment(self.url, self.api_key)


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
        """True once its end was requested: leaving the block changes nothing then."""
        self._membership: ambient.Membership | None = None

    @property
    def blocking(self) -> Session:
        """The same session for code in other threads, with blocking methods."""
        return Session(self)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """Return a client whose calls are always the session's, with OpenAI's ``options``.

        ConfigError if the package openai is not installed.
        """
        client: openai.AsyncOpenAI = clients.openai_client("Async", self.url, self.api_key, options)
        return client

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """Return a client whose calls are always the session's, with Anthropic's ``options``.

        ConfigError if the package anthropic is not installed.
        """
        client: anthropic.AsyncAnthropic = clients.anthropic_client(
            "Async", self.url, self.api_key, options
        )
        return client

    async def set_reward(self, reward: Reward, completion_id: str | None = None) -> RewardSet:
        """Reward one completion or response, by its id; by default the last one. Another call for
        the same one replaces its reward."""
        async with self._client() as client:
            return await client.set_reward(
                self.api_key, reward, completion_id=completion_id, session_id=self.session_id
            )

    async def set_final_reward(self, reward: Reward) -> RewardSet:
        """Reward the whole session; can be revised until a trainer has it."""
        async with self._client() as client:
            return await client.set_final_reward(self.api_key, reward, session_id=self.session_id)

    async def set_returned(self, returned: Any, name: str = "the agent") -> None:
        """Set the rewards that the agent function ``name`` returned: a number (of the last
        completion), a dict (by completion id), or None (nothing).

        AgentFailed for any other value, for an id that is not the session's, and for a reward
        where no call was made.
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
        """End the session: it is trained on as it is. Unprocessable without a reward or a call.

        ``await_reward``: end its calls only, and wait ``deadline`` seconds for its reward (default:
        as long as the service allows). ``idempotency_key``: the key under which the same request
        may be repeated.
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
        """Abort the session: nothing of it is trained on.

        ``keep_place``: another session may take its place in its group, which is one smaller
        otherwise.
        """
        async with self._client() as client:
            info = await client.abort(self._started, reason[:200], keep_place=keep_place)
        self.ended = True
        return info

    async def abort_quietly(self, reason: str, *, keep_place: bool = False) -> None:
        """Abort the session within a few seconds, or log why not: a session that is not ended
        expires."""
        try:
            async with asyncio.timeout(_ABORT_TIMEOUT):
                await self.abort(reason, keep_place=keep_place)
        except (AnyAgentError, TimeoutError) as error:
            log.info("session %s could not be aborted: %s", self.session_id, error)

    async def info(self) -> SessionInfo:
        """Return the session's present state."""
        async with self._client() as client:
            return await client.session_info(self.session_id, self.api_key)

    @property
    def asked_to_end(self) -> bool:
        """True if a method, or a client that has joined it, has requested its end."""
        return self.ended or (self._membership is not None and self._membership.asked_to_end)

    async def end_state(self) -> SessionInfo | None:
        """Return the state of a session that any caller has ended; None while it is open, and if
        it has expired."""
        info = await self.info()
        if info.state in ("open", "expired"):
            return None
        self.ended = True
        return info

    def detach(self) -> None:
        """Leave the session open for another caller to end, also when the block is left."""
        self.ended = True

    # ------------------------------------------------------------------------------------------

    def _client(self) -> shared_client:
        """The calling event loop's client, also of another one than the session's."""
        return shared_client(self._service, retry_for=self._retry_for)

    def _no_calls(self) -> str:
        return (
            f"none came to {self.base_url} with its key; give the client session.base_url and "
            "session.api_key, or use it with exactly this URL inside of the session"
        )


class Session(SessionBase):
    """An open session with blocking methods, which are those of :class:`AsyncSession`."""

    def __init__(self, session: AsyncSession) -> None:
        super().__init__(session._service, session._started)
        self._session = session

    @property
    def ended(self) -> bool:
        return self._session.ended

    def openai(self, **options: Any) -> openai.OpenAI:
        client: openai.OpenAI = clients.openai_client("", self.url, self.api_key, options)
        return client

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        client: anthropic.Anthropic = clients.anthropic_client("", self.url, self.api_key, options)
        return client

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

    Leaving the block finalizes the session, unless it was ended before; an exception aborts it,
    unless it was finalized. Inside, unmodified aiohttp, httpx, httpx2 and requests clients that
    call the service make their calls in it, in this task or thread and in those that copy its
    context.

    ``url`` and ``api_key`` are by default those of the environment (`find_service`). Fields of
    :class:`any_agent.protocol.StartSession`: ``task_id``, ``group_id``, ``group_size``, ``mode``,
    ``metadata``, ``version``, ``ttl`` (seconds). ``wait``: seconds to wait for a slot.
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
        url: str | None = None,
        api_key: str | None = None,
        wait: float = 300.0,
        retry_for: float | None = None,
        idempotency_key: str | None = None,
        on_missing_reward: OnMissingReward = "raise",
    ) -> None:
        """ConfigError if no service is named, or its key cannot open sessions; InvalidRequest for
        an invalid field."""
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
        _validate(self._fields)
        self._wait = wait
        self._retry_for = self.service.patience if retry_for is None else retry_for
        self._idempotency_key = idempotency_key
        self._on_missing_reward = on_missing_reward
        self._opening = False
        self._shared = shared_client(self.service, retry_for=self._retry_for)
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
            # Ctrl-C, just after it was opened.
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
            # Of a generator that was not closed: no thread is left that could end the session.
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
            raise RuntimeError("this AgentSession was used already: make another one")
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
                await session.abort_quietly(f"its agent raised {type(error).__name__}")
                return
            try:
                await self._end(session)
            except BaseException as refused:
                code = (
                    refused.code if isinstance(refused, AnyAgentError) else type(refused).__name__
                )
                await session.abort_quietly(f"not finalized: {code}")
                raise
        finally:
            heartbeats().remove(session._started)
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


def _validate(fields: dict[str, Any]) -> None:
    try:
        StartSession(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the session"
        raise InvalidRequest(f"{where}: {first['msg']}", param=where) from None
