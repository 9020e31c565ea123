"""The frozen models of one rank: which there are, and calls of them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from any_agent.completions.apis import Api
from any_agent.config import Config, FrozenConfig
from any_agent.errors import (
    AnyAgentError,
    ConfigError,
    InvalidRequest,
    NotFound,
    TooManyRequests,
    UnsupportedParameter,
)
from any_agent.record import FROZEN_MODEL, frozen_id, is_frozen, strip_content
from any_agent.types import GenerationHyperparameters, Interaction
from proxy_ext.frozen.call import FrozenCall, FrozenCallEnd
from proxy_ext.frozen.model_routing import PolicyNames
from proxy_ext.frozen.provider import Deployment, Provider
from proxy_ext.frozen.provider_requests import FrozenRequest, checked
from proxy_ext.frozen.provider_responses import ANSWERS, ids_in, text_in
from proxy_ext.frozen.spend_caps import SpendCaps
from proxy_ext.frozen.stats import FrozenStats
from proxy_ext.journal import PutInteraction
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.web.exchange import ClientConnection, EventStream
from proxy_ext.web.quotas import TenantQuotas

log = logging.getLogger(__name__)

_LONG = 65_536
"""Characters; counting the tokens of a megabyte takes a second."""
_MAX_COUNTED = 1 << 20
"""Characters of a text whose tokens are counted; of a longer one they are reckoned from these."""


def require_prices(config: FrozenConfig, provider: Provider) -> None:
    """ConfigError for a cap that would not see what a model costs; without caps that is said."""
    unpriced = ", ".join(
        name
        for name, places in provider.deployments.items()
        if not all(deployment.priced for _, deployment in places)
    )
    if not unpriced:
        return
    caps = {"frozen.session_usd": config.session_usd, "frozen.tenant_usd": config.tenant_usd}
    if capped := " and ".join(name for name, cap in caps.items() if cap is not None):
        raise ConfigError(
            f"{capped} cannot see what these models of frozen.model_list cost: {unpriced}; give "
            "each input_cost_per_token and output_cost_per_token in its model_info, 0 if it is free"
        )
    log.warning("no price is known of %s: what their calls cost is not counted", unpriced)


class FrozenModels:
    """See the module. Without any configured it costs nothing."""

    def __init__(
        self,
        config: Config,
        provider: Provider | None,
        sessions: SessionStore,
        quotas: TenantQuotas,
    ) -> None:
        self.policy = PolicyNames(config.model)
        self.spending = SpendCaps(sessions.journal, config.frozen, ranks=config.server.ranks)
        self.stats = FrozenStats()
        self._config = config.frozen
        self._client_timeout = config.server.client_timeout
        self._store_content = config.sessions.store_content
        self._sessions = sessions
        self._quotas = quotas
        self._provider = provider
        self._models = provider.deployments if provider is not None else {}
        self._running: set[FrozenCall] = set()

    def __len__(self) -> int:
        """Calls under way."""
        return len(self._running)

    @property
    def names(self) -> list[str]:
        return list(self._models)

    def knows(self, body: Any) -> bool:
        """Whether a body names a frozen model."""
        if not self._models or not isinstance(body, dict):
            return False
        name = body.get("model")
        return isinstance(name, str) and name in self._models

    async def answer(
        self,
        request: Request,
        api: Api,
        body: Mapping[str, Any],
        session: RecordedSession | None,
        tenant: str | None,
    ) -> Response:
        """Answer one call of a frozen model, whole or as events.

        Raises InvalidRequest, UnsupportedParameter, SpendCapExceeded, TooManyRequests or
        ProviderError.
        """
        if api.name not in ANSWERS:
            raise UnsupportedParameter(
                f"frozen models cannot be called at {api.path}: call the policy, or use "
                "/v1/chat/completions",
                param="model",
            )
        deployment = self._choose(body["model"], session)
        asked = checked(api.name, body)
        if api.name == "embeddings" and asked.stream:
            raise InvalidRequest("embeddings are not streamed", param="stream")
        await self._go_on_from(asked, session, deployment)
        await self.spending.require(session, tenant)
        call = self._begin(asked, deployment, session, tenant)
        if asked.stream:
            return await self._stream(request, call)
        return await self._whole(request, call)

    async def close(self) -> None:
        """End every call."""
        for call in tuple(self._running):
            call.abort("the service is stopping")
        tasks = [call.task for call in self._running if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=10)
        if self._provider is not None:
            await self._provider.close()

    # ------------------------------------------------------------------------------------------

    def _choose(self, name: str, session: RecordedSession | None) -> Deployment:
        """One of the places where a model is served; a session stays at its own."""
        places = self._models[name]
        if len(places) == 1:
            return places[0][1]
        said = f"{name} {session.id}" if session is not None else str(time.monotonic_ns())
        seed = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "big")
        weights = [weight for weight, _ in places]
        return random.Random(seed).choices([place for _, place in places], weights)[0]

    async def _go_on_from(
        self, asked: FrozenRequest, session: RecordedSession | None, deployment: Deployment
    ) -> None:
        """The provider's own name of the response that this one goes on from."""
        if asked.previous is None:
            return
        if not deployment.keeps_responses:
            raise InvalidRequest(
                f"the provider of {asked.model} keeps no responses: send the whole conversation as "
                "input, without previous_response_id",
                param="previous_response_id",
            )
        stored = await self._sessions.journal.interactions(session.id) if session else []
        for each in stored:
            if each.interaction.id == asked.previous and is_frozen(each.interaction):
                said = each.interaction.request.get("frozen", {})
                if said.get("model") == asked.model and said.get("provider_id"):
                    asked.params["previous_response_id"] = said["provider_id"]
                    return
        raise NotFound(
            f"Previous response with id {asked.previous[:80]!r} is not one of this model in this "
            "session",
            code="previous_response_not_found",
            param="previous_response_id",
        )

    def _begin(
        self,
        asked: FrozenRequest,
        deployment: Deployment,
        session: RecordedSession | None,
        tenant: str | None,
    ) -> FrozenCall:
        if session is not None:
            session.require_open()
        if len(self._running) >= self._config.max_calls:
            self.stats.turned_away += 1
            raise TooManyRequests(
                f"{len(self._running)} calls of frozen models are under way here, as many as may "
                "be (frozen.max_calls); try again",
                code="too_many_calls",
                retry_after=1,
            )
        answer = ANSWERS[asked.api](frozen_id(), include_usage=asked.include_usage)
        call = FrozenCall(
            asked,
            deployment,
            answer,
            session,
            tenant,
            timeout=self._config.timeout,
            record=self._record,
        )
        self._running.add(call)
        if session is not None:
            session.frozen_calls.add(call)
            session.touch()
        call.start()
        assert call.task is not None
        call.task.add_done_callback(lambda _: self._ended(call))
        return call

    def _ended(self, call: FrozenCall) -> None:
        self._running.discard(call)
        if call.session is not None:
            call.session.frozen_calls.discard(call)
            call.session.touch()
        self.stats.ended[call.request.model, call.outcome] += 1
        if call.failure is None:
            self.stats.seconds.observe(time.time() - call.created_at)
        elif call.outcome == "failed":
            error = call.failure
            log.warning("a call of %s failed: %d %s", call.request.model, error.status, error.code)

    # ------------------------------------------------------------------------------------------

    async def _record(self, call: FrozenCall, whole: bool) -> None:
        """Count what a call cost, and write it down with its session, if it has one."""
        answer, asked = call.answer, call.request
        estimated = not whole or not answer.prompt_told()
        if estimated:
            # Of a stream that broke off, some usage may have been told at its beginning.
            told = answer.tokens()
            texts = text_in([asked.messages, asked.tools])
            counted = ids_in(asked.messages) + await _count(call.deployment, texts)
            prompt = told[0] or counted
            output = await _count(call.deployment, answer.said())
            answer.usage = answer.estimated(prompt, max(told[1], output))
        cost = call.deployment.cost(asked.api, answer.usage)
        prompt, output = answer.tokens()
        stats = self.stats
        stats.input_tokens[asked.model] += prompt
        stats.output_tokens[asked.model] += output
        stats.unpriced[asked.model] += cost is None
        stats.usd[asked.model] = stats.usd.get(asked.model, 0.0) + (cost or 0.0)
        self._quotas.charge_tokens(call.tenant, prompt + output)
        written = await self.spending.add(call.session, call.tenant, cost)
        if call.session is None:
            await self._sessions.deliveries.commit(*written)
            return
        said = {
            "api": asked.api,
            "model": asked.model,
            "usage": answer.usage,
            "estimated": estimated,
            "cost_usd": cost,
            "provider_id": answer.provider_id,
            "provider_model": answer.provider_model,
        }
        interaction = _interaction(call, whole=whole)
        if not self._store_content:
            interaction = strip_content(interaction)
        interaction.request = {**interaction.request, "frozen": said}
        await self._sessions.deliveries.commit(PutInteraction(interaction), *written)

    # ------------------------------------------------------------------------------------------

    async def _whole(self, request: Request, call: FrozenCall) -> Response:
        async with ClientConnection(request, on_leave=lambda: call.abort("the client left")):
            end = await call.next()
        assert isinstance(end, FrozenCallEnd)
        return Response(end.data, headers=_headers(call), media_type="application/json")

    async def _stream(self, request: Request, call: FrozenCall) -> Response:
        # What fails before the first event is an HTTP error, so that comes first.
        try:
            async with ClientConnection(request, on_leave=lambda: call.abort("the client left")):
                first = await call.next()
        except BaseException:
            call.abort("the client left")
            raise

        async def finish() -> None:
            call.abort("the client left")

        events = _events(request, call, first)
        return EventStream(events, _headers(call), finish=finish, send_timeout=self._client_timeout)


async def _events(
    request: Request, call: FrozenCall, item: bytes | FrozenCallEnd
) -> AsyncGenerator[bytes]:
    async with ClientConnection(request, on_leave=lambda: call.abort("the client left")):
        while isinstance(item, bytes):
            yield item
            try:
                item = await call.next()
            except AnyAgentError as error:
                # The status is sent already.
                yield call.answer.failed(error)
                return
        yield item.data


def _headers(call: FrozenCall) -> dict[str, str]:
    out = {}
    if call.session is not None:
        out["x-any-agent-interaction"] = call.answer.id
        out["x-any-agent-session"] = call.session.id
    return out


def _interaction(call: FrozenCall, *, whole: bool) -> Interaction:
    assert call.session is not None
    asked, answer = call.request, call.answer
    nothing = np.zeros(0, np.int32)
    return Interaction(
        id=answer.id,
        session_id=call.session.id,
        parent_id=None,
        prompt_delta_ids=nothing,
        output_ids=nothing,
        output_logprobs=np.zeros(0, np.float32),
        output_versions=nothing,
        message_delta=asked.messages,
        output_message=answer.message(),
        finish_reason=answer.finish_reason if whole else "abort",
        gconfig=GenerationHyperparameters(),
        model=asked.model,
        tools=asked.tools,
        untrainable_reason=FROZEN_MODEL,
        request={"recorded": asked.recorded} if asked.recorded else {},
        created_at=call.created_at,
    )


async def _count(deployment: Deployment, text: str) -> int:
    """About how many tokens a text has."""
    beginning = text[:_MAX_COUNTED]
    with contextlib.suppress(Exception):
        if len(text) <= _LONG:
            return deployment.count(text)
        found = await asyncio.to_thread(deployment.count, beginning)
        return found * len(text) // len(beginning)
    return len(text) // 4
