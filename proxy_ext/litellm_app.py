"""LiteLLM's app in a rank, with an operator's configuration; without one there is none. It starts
beside the policy's calls, which do not wait for it: its import takes ten seconds of CPU."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from any_agent.completions.params.call import ChatCall
from any_agent.completions.untrainable import GUARDRAIL_VETO, UntrainableReason
from any_agent.config.litellm import has_callbacks, may_have_keys, read_litellm_config
from any_agent.errors import (
    ConfigError,
    ServiceUnavailable,
    TooManyRequests,
    Unprocessable,
)
from any_agent.runtime.metrics import RegisteredMetrics
from any_agent.types import Message
from proxy_ext import litellm_keys, litellm_policy, litellm_proxy
from proxy_ext.litellm_policy import METRICS_PREFIX, PolicyEvent
from proxy_ext.litellm_shim import lifespan, warm_up

log = logging.getLogger(__name__)

_START_TIMEOUT = 120.0
"""Seconds that a request waits for the app's start."""
_RETRY_AFTER = 30.0
"""Seconds after which a failed start is tried again: a database may be back."""


class LiteLLMApp:
    """An ASGI app over LiteLLM's, which it loads at its first request."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load
        self._started: asyncio.Task[ASGIApp] | None = None
        self._stack = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = await self.started()
        await app(scope, receive, send)

    async def started(self) -> ASGIApp:
        """Return the app, once it has started; all callers wait for the same start."""
        if self._started is None:
            self._started = asyncio.create_task(self._start())
        # The first client may leave.
        return await asyncio.shield(self._started)

    async def _start(self) -> ASGIApp:
        try:
            # In a thread, so that streams go on.
            app: ASGIApp = await asyncio.to_thread(self._load)
            await self._stack.enter_async_context(lifespan(app))
        except BaseException:
            # The next request tries again.
            self._started = None
            raise
        # The app's objects stay, as those of the start do.
        gc.freeze()
        return app

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Shut LiteLLM's app down at the end, if it was started."""
        try:
            yield
        finally:
            if self._started is not None:
                await asyncio.wait([self._started])
            await self._stack.aclose()


class ConfiguredLiteLLMApp(LiteLLMApp):
    """LiteLLM's app with an operator's configuration, which starts with the rank."""

    def __init__(
        self,
        path: str,
        policy: frozenset[str],
        *,
        ranks: int,
        guardrails: Sequence[str] = (),
        vetoes: Sequence[str] = (),
        redis: litellm_proxy.SharedRedis | None = None,
        on_refused: Callable[[ConfigError], None],
    ) -> None:
        """``policy``: the policy's names. ``guardrails``: the names of those that judge its calls.
        ``vetoes``: those among them whose refusal of an answer is about its session. ``redis``:
        where LiteLLM counts for all ranks, if its configuration names no Redis.
        ``on_refused`` is called with the error of a configuration that cannot be used."""
        super().__init__(lambda: _warm(litellm_proxy.load_proxy(path, redis=redis)))
        self._path = path
        self._policy = policy
        self._ranks = ranks
        self._guardrails = tuple(guardrails)
        self._vetoes = frozenset(vetoes)
        data = read_litellm_config(path)
        self.has_callbacks = has_callbacks(data)
        self.has_keys = may_have_keys(data, os.environ)
        """True if LiteLLM may have virtual keys, False if it has none."""
        self._on_refused = on_refused
        self.problem: str | None = "LiteLLM is starting"
        """The reason that LiteLLM serves nothing yet; None once it does."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.require()
        await super().__call__(scope, receive, send)

    async def require(self) -> None:
        """Wait for LiteLLM's start; ServiceUnavailable (`litellm_unavailable`) if it fails."""
        if self.problem is None:
            return
        with suppress(Exception):
            async with asyncio.timeout(_START_TIMEOUT):
                await self.started()
        if self.problem is not None:
            raise self._unavailable(self.problem)

    def _unavailable(self, problem: str) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"{problem}; the policy can be called meanwhile",
            code="litellm_unavailable",
            retry_after=10,
        )

    async def knows(self, name: str) -> bool:
        """Return whether LiteLLM serves a model with this name; errors as for `require`."""
        if name in self._policy:
            return False
        await self.require()
        return litellm_proxy.knows(name)

    async def hash_of_key(self, key: str) -> str | None:
        """Return the hash of a virtual key, which LiteLLM has judged; None if it judges no keys.

        Raises LiteLLM's refusal, unless that is of a budget: over it, a key opens nothing, and its
        holder still ends what it has opened. ServiceUnavailable (`litellm_unavailable`) while
        LiteLLM starts: nobody waits for that with a key that may be wrong.
        """
        if not self.has_keys or not key.startswith(litellm_keys.PREFIX):
            return None
        if self.problem is not None:
            raise self._unavailable(self.problem)
        if not litellm_keys.has_database():
            return None
        key_hash = litellm_keys.hash_of(key)
        with suppress(TooManyRequests):
            await litellm_keys.require(key_hash, None)
        return key_hash

    async def require_key(self, tenant: str | None, model: str | None = None) -> None:
        """Raise LiteLLM's refusal of the virtual key that a tenant stands for, if it does.

        ``model``: the policy's name, for a call of it.
        """
        key_hash = litellm_keys.hash_in(tenant) if self.has_keys else None
        if key_hash is not None:
            await self.require()
            await litellm_keys.require(key_hash, model)

    async def metrics(self, part: str) -> list[bytes]:
        """Return the texts of the metrics that LiteLLM's callback for Prometheus has, if it has."""
        if self.problem is not None:
            return []
        return [await asyncio.to_thread(RegisteredMetrics(METRICS_PREFIX, part).render)]

    async def charge(self, event: PolicyEvent, input_cost: float, output_cost: float) -> None:
        """Have LiteLLM count a call of the policy for the virtual key that its tenant stands for.

        ``input_cost``, ``output_cost``: USD of a token.
        """
        await self.require()
        if litellm_keys.has_database():
            await litellm_policy.charge(event, input_cost, output_cost)

    async def require_allowed(self, call: ChatCall) -> None:
        """Raise Unprocessable (`guardrail_refused`) for a prompt that a guardrail refuses."""
        for name in self._guardrails:
            await self.require()
            reason = await litellm_policy.judge(name, call.model, call.messages)
            if reason is not None:
                raise Unprocessable(
                    f"the guardrail {name} refuses this call: {reason}", code="guardrail_refused"
                )

    async def refuses(
        self, call: ChatCall, answer: Message, *, trainable: bool
    ) -> UntrainableReason | None:
        """Return a reason against training if a guardrail refuses the policy's answer to a call.

        ``trainable``: False for an answer that is kept out of training already.
        """
        reason: UntrainableReason | None = None
        for name in self._guardrails:
            vetoes = name in self._vetoes
            if not vetoes and (reason is not None or not trainable):
                continue
            if await litellm_policy.judge(name, call.model, call.messages, answer) is not None:
                kept = "a session" if vetoes else "an answer"
                log.warning("the guardrail %s keeps %s out of training", name, kept)
                if vetoes:
                    return GUARDRAIL_VETO
                reason = "guardrail"
        return reason

    async def _start(self) -> ASGIApp:
        try:
            app = await super()._start()
            litellm_proxy.adopt(self._path, self._policy, ranks=self._ranks)
            litellm_policy.require_guardrails(self._guardrails, self._path)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            refused = error if isinstance(error, ConfigError) else None
            if refused is None and not is_outage(error):
                refused = litellm_proxy.refusal(self._path, error)
            if refused is not None:
                self._on_refused(refused)
            self.problem = f"LiteLLM could not start ({type(error).__name__}): see the rank's log"
            raise RuntimeError(self.problem) from error
        self.problem = None
        log.info("LiteLLM serves %s", self._path)
        return app

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        async with super().lifespan():
            starting = asyncio.create_task(self._keep_trying())
            try:
                yield
            finally:
                starting.cancel()
                await asyncio.wait([starting])

    async def _keep_trying(self) -> None:
        while True:
            try:
                await self.started()
                return
            except Exception:
                log.exception("LiteLLM could not start, and is tried again")
            await asyncio.sleep(_RETRY_AFTER)


def _warm(app: Any) -> Any:
    warm_up()
    return app


def is_outage(error: BaseException) -> bool:
    """Return whether a start failed because another service cannot be reached."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionError | TimeoutError | socket.gaierror):
            return True
        if "Connect" in type(seen).__name__:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
