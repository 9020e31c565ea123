"""`AsyncSession` and `Session`: an open session with awaitable or blocking methods."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

from any_agent.client.aiohttp_transport import tls_context
from any_agent.client.environment import environment
from any_agent.errors import AnyAgentError, ConfigError, Unprocessable
from any_agent.protocol.rl import RewardSet, SessionContent, SessionInfo, SessionStarted
from any_agent.rewards.returned import give_rewards, rewards_of
from any_agent.sdk import session_context as ambient
from any_agent.sdk.find_service import ServiceAddress, shared_client
from any_agent.sdk.sdk_thread import sdk_thread, wait_for

if TYPE_CHECKING:
    import anthropic
    import openai

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

Reward: TypeAlias = float | dict[str, float]
"""A number, or several by name."""

_ABORT_TIMEOUT = 5.0  # seconds; a session that could not be aborted expires
_MAX_RETRIES = 10
"""Retries of a session's model clients, as a full engine and a restarted rank ask for them. Retried
calls are marked, and are not sampled twice."""


class SessionBase:
    """An opened session's identity and addresses."""

    def __init__(
        self, service: ServiceAddress, started: SessionStarted, *, judged: bool = False
    ) -> None:
        self._service = service
        self._judged = judged
        """True if the opener is the judge: the agent's own end only ends the session's calls."""
        self._started = started
        self.session_id = started.session_id
        self.task_id = started.task_id
        self.group_id = started.group_id
        self.mode = started.mode
        self.api_key = started.api_key
        """The session's own key, which an OpenAI client takes as its API key."""
        self.version = started.version
        """The weight version that was served when the session was opened."""
        self.expires_in = started.expires_in
        """Seconds from its opening until it expires in any case."""

    @property
    def url(self) -> str:
        """The service's URL without `/v1`, which Anthropic's clients take as their base URL."""
        return self._service.url

    @property
    def base_url(self) -> str:
        """The service's URL with `/v1`, which OpenAI's clients take as their base URL."""
        return f"{self.url}/v1"

    @property
    def session_url(self) -> str:
        """A base URL for OpenAI's clients that names the session, so that any key will do."""
        return f"{self.url}/{self.api_key}/v1"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id} at {self.url}>"

    def env(self) -> dict[str, str]:
        """Return the environment that puts another process's OpenAI and Anthropic clients into the
        session."""
        return environment(self.url, self.api_key)

    def _model_client(
        self,
        package: Literal["openai", "anthropic"],
        kind: Literal["", "Async"],
        options: dict[str, Any],
    ) -> Any:
        """Return a client of an optional package; ConfigError if it is not installed."""
        name, base_url = {
            "openai": ("OpenAI", self.base_url),
            "anthropic": ("Anthropic", self.url),
        }[package]
        try:
            module = import_module(package)
        except ImportError as error:
            raise ConfigError(f"{package} is not installed: pip install {package}") from error
        if options.get("http_client") is None:
            # With the process's TLS context, as a client's own would read all certificates again,
            # and without redirects, as calls of a session are for the service alone.
            make = getattr(module, f"Default{kind}HttpxClient")
            options["http_client"] = make(verify=tls_context(), follow_redirects=False)
        own = {"base_url": base_url, "api_key": self.api_key}
        client = getattr(module, f"{kind}{name}")
        return client(**{"max_retries": _MAX_RETRIES, **options, **own})


class AsyncSession(SessionBase):
    """An open session. Methods raise the AnyAgentError that the service answered."""

    def __init__(
        self,
        service: ServiceAddress,
        started: SessionStarted,
        *,
        retry_for: float | None,
        judged: bool = False,
    ) -> None:
        super().__init__(service, started, judged=judged)
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
        client: openai.AsyncOpenAI = self._model_client("openai", "Async", options)
        return client

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """Return a client whose calls are always the session's, with Anthropic's ``options``.

        ConfigError if the package anthropic is not installed.
        """
        client: anthropic.AsyncAnthropic = self._model_client("anthropic", "Async", options)
        return client

    async def set_reward(self, reward: Reward, completion_id: str | None = None) -> RewardSet:
        """Reward one completion or response, by its id; by default the last one. Another call for
        the same one replaces its reward."""
        async with self._client() as client:
            return await client.set_reward(
                self._started.end_key,
                reward,
                completion_id=completion_id,
                session_id=self.session_id,
            )

    async def set_final_reward(self, reward: Reward) -> RewardSet:
        """Reward the whole session; can be revised until a trainer has it."""
        async with self._client() as client:
            key = self._started.end_key
            return await client.set_final_reward(key, reward, session_id=self.session_id)

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
                    self._started.end_key,
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

    async def content(self) -> SessionContent:
        """Return the session's messages, as graders get them."""
        async with self._client() as client:
            return await client.session_content(self.session_id, self._started.end_key)

    async def info(self) -> SessionInfo:
        """Return the session's present state."""
        async with self._client() as client:
            return await client.session_info(self.session_id, self.api_key)

    @property
    def asked_to_end(self) -> bool:
        """True if a method, or a client that has joined it, has requested its end."""
        return self.ended or (self._membership is not None and self._membership.asked_to_end)

    async def end_state(self) -> SessionInfo | None:
        """Return the state of a session that any caller has ended; None while it is open, or
        awaits the reward of its opener, and if it has expired."""
        info = await self.info()
        if info.state in ("open", "expired") or (self._judged and info.state == "awaiting_reward"):
            return None
        self.ended = True
        return info

    def detach(self) -> None:
        """Leave the session open for another caller to end, also when the block is left."""
        self.ended = True

    def _client(self) -> shared_client:
        """Return the client of the calling event loop, which need not be the session's."""
        return shared_client(self._service, retry_for=self._retry_for)

    def _no_calls(self) -> str:
        return (
            f"none came to {self.base_url} with its key; give the client session.base_url and "
            "session.api_key, or use it with exactly this URL inside of the session"
        )


def _blocking(
    method: Callable[Concatenate[AsyncSession, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Session, P], T]:
    @wraps(method)
    def call(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return session._wait(method(session._session, *args, **kwargs), method.__name__)

    return call


class Session(SessionBase):
    """An open session with blocking methods, which are those of :class:`AsyncSession`."""

    def __init__(self, session: AsyncSession) -> None:
        super().__init__(session._service, session._started)
        self._session = session

    @property
    def ended(self) -> bool:
        return self._session.ended

    def openai(self, **options: Any) -> openai.OpenAI:
        client: openai.OpenAI = self._model_client("openai", "", options)
        return client

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        client: anthropic.Anthropic = self._model_client("anthropic", "", options)
        return client

    set_reward = _blocking(AsyncSession.set_reward)
    set_final_reward = _blocking(AsyncSession.set_final_reward)
    set_returned = _blocking(AsyncSession.set_returned)
    finalize = _blocking(AsyncSession.finalize)
    abort = _blocking(AsyncSession.abort)
    info = _blocking(AsyncSession.info)

    def detach(self) -> None:
        self._session.detach()

    def _wait(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        forked = self._session._process != os.getpid()
        loop = sdk_thread().loop if forked else self._session._loop
        return wait_for(coroutine, loop, what=f"session.{what}")
