"""The frozen models of one rank, their calls, and the routing between them and the policy."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from any_agent.auth.access import Caller
from any_agent.completions.apis import Api
from any_agent.config import Config, FrozenConfig, ModelConfig
from any_agent.errors import (
    ConfigError,
    InvalidRequest,
    NotFound,
    TooManyRequests,
    UnsupportedParameter,
)
from any_agent.record import FROZEN_MODEL, is_frozen, strip_content
from any_agent.types import GenerationHyperparameters, Interaction
from proxy_ext.frozen.app_call import (
    Answered,
    AppCall,
    AppDeployment,
    app_request,
    litellm_scope,
)
from proxy_ext.frozen.call import FrozenCall, FrozenStats, Place
from proxy_ext.frozen.provider_requests import FrozenRequest, check_frozen_request
from proxy_ext.frozen.provider_responses import RESPONSES, ids_in, text_in
from proxy_ext.frozen.route_call import RouteCall
from proxy_ext.frozen.spend_caps import SpendCaps
from proxy_ext.journal import PutInteraction
from proxy_ext.litellm_app import ConfiguredLiteLLMApp
from proxy_ext.litellm_proxy import CALLER_SCOPE_KEY
from proxy_ext.litellm_shim import LiteLLMDeployment, LiteLLMProvider
from proxy_ext.sessions.session import RecordedSession, abort_calls
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.web.quotas import TenantQuotas

log = logging.getLogger(__name__)

OTHER = "other"
_MAX_NAMES = 32
_MAX_SHOWN = 8  # adapters in a message
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}")
_LONG_TEXT = 65_536
"""Characters beyond which tokens are counted in a thread: those of a megabyte take a second."""
_MAX_COUNTED = 1 << 20
"""Characters whose tokens are counted; a longer text is estimated from its beginning."""


def require_prices(config: FrozenConfig, provider: LiteLLMProvider) -> None:
    """Raise ConfigError for a cap over a model without a known price; without caps, log it."""
    unpriced = ", ".join(
        name
        for name, places in provider.deployments.items()
        if not all(deployment.priced for deployment in places)
    )
    if not unpriced:
        return
    caps = {"frozen.session_usd": config.session_usd, "frozen.tenant_usd": config.tenant_usd}
    if capped := " and ".join(name for name, cap in caps.items() if cap is not None):
        raise ConfigError(
            f"{capped} cannot see what these models of frozen.model_list cost: {unpriced}; give "
            "each input_cost_per_token and output_cost_per_token in its model_info, 0 if it is free"
        )
    log.warning("no price is known for %s: the cost of their calls is not counted", unpriced)


class PolicyNames:
    """The names that agents give the policy: counted, and refused where only some are allowed."""

    def __init__(self, config: ModelConfig, adapters: Iterable[str]) -> None:
        self.adapters = tuple(adapters)
        """The models that are the policy with an adapter."""
        self.known = (config.name, *config.policy_names, *self.adapters)
        self._rejects = config.unknown_model == "reject"
        self.calls: Counter[str] = Counter()
        """Calls of the policy by the name that they gave it. Clients choose these names, so only
        the first ones are counted apart."""

    def count_call(self, body: Any) -> None:
        """Count a call of the policy; NotFound (`model_not_found`) if it names something else."""
        name = body.get("model") if isinstance(body, dict) else None
        if name is None:
            name = self.known[0]
        if not isinstance(name, str):
            # The parser refuses it.
            return
        if self._rejects and name not in self.known:
            raise NotFound(
                f"there is no model {name[:80]!a}; the policy is called {self.known[0]!a}"
                + "".join(f", an adapter {adapter!a}" for adapter in self.adapters[:_MAX_SHOWN]),
                code="model_not_found",
                param="model",
            )
        known = name in self.calls or name in self.known
        room = len(self.calls) < _MAX_NAMES and _PLAIN_NAME.fullmatch(name)
        self.calls[name if known or room else OTHER] += 1


class FrozenModels:
    """The frozen models of one rank and their calls; free of cost where none is configured."""

    def __init__(
        self,
        config: Config,
        provider: LiteLLMProvider | None,
        sessions: SessionStore,
        quotas: TenantQuotas,
        app: ConfiguredLiteLLMApp | None = None,
    ) -> None:
        """``app``: LiteLLM's, where an operator's configuration lists the models."""
        self.policy = PolicyNames(config.model, config.engine.adapters)
        self.spending = SpendCaps(sessions.journal, config.frozen, ranks=config.server.ranks)
        self.stats = FrozenStats()
        self._config = config
        self._sessions = sessions
        self._quotas = quotas
        self._provider = provider
        self._models = provider.deployments if provider is not None else {}
        self._app = app
        self._labels: dict[str, None] = dict.fromkeys(self._models)
        self._running: set[FrozenCall | RouteCall] = set()

    def __len__(self) -> int:
        """Return the number of calls under way."""
        return len(self._running)

    @property
    def names(self) -> list[str]:
        """The models that are configured here."""
        return list(self._models)

    @property
    def labels(self) -> list[str]:
        """The models in metrics; a pattern of LiteLLM's has as many names as clients like."""
        return list(self._labels)

    def _label(self, name: str) -> str:
        if name not in self._labels and len(self._labels) >= _MAX_NAMES:
            name = OTHER
        self._labels.setdefault(name)
        return name

    async def is_named_by(self, body: Any) -> bool:
        """Return True if a body names a frozen model; ServiceUnavailable while LiteLLM starts."""
        name = body.get("model") if isinstance(body, dict) else None
        if self._app is None or not isinstance(name, str):
            return isinstance(name, str) and name in self._models
        return await self._app.knows(name)

    async def answer(
        self,
        request: Request,
        api: Api,
        body: Mapping[str, Any],
        session: RecordedSession | None,
        tenant: str | None,
        caller: Caller,
        role: str = "",
    ) -> Response:
        """Answer one call of a frozen model, whole or as events.

        Raises InvalidRequest, UnsupportedParameter, SpendCapExceeded, TooManyRequests or
        ProviderError.
        """
        if api.name not in RESPONSES:
            raise UnsupportedParameter(
                f"frozen models cannot be called at {api.path}: call the policy, or use "
                "/v1/chat/completions",
                param="model",
            )
        if self._app is not None:
            path = f"/v1{api.path}"
            scope = litellm_scope(request.scope, path, caller, session, tenant)
            admin = scope[CALLER_SCOPE_KEY].admin
            checked = app_request(api.name, body, admin=admin)
            place = AppDeployment(scope, self._app)
            await self.spending.require(session, tenant)
            call = self._start(replace(checked, role=role), place, session, tenant)
        else:
            deployment = self._choose(body["model"], session)
            checked = check_frozen_request(api.name, body)
            if checked.previous is not None:
                await self._continue_response(checked, checked.previous, session, deployment)
            await self.spending.require(session, tenant)
            call = self._start(replace(checked, role=role), deployment, session, tenant)
        try:
            return await call.respond(
                request, send_timeout=self._config.server.client_timeout, ping=api.ping
            )
        except Answered as answered:
            return answered.response

    async def close(self) -> None:
        """Abort every call, and close the provider's connections."""
        await abort_calls(self._running, "the service is stopping", seconds=10)
        if self._provider is not None:
            await self._provider.close()

    def _choose(self, name: str, session: RecordedSession | None) -> LiteLLMDeployment:
        """Choose one of a model's places by weight; a session stays at its own."""
        places = self._models[name]
        if len(places) == 1:
            return places[0]
        key = f"{name} {session.id}" if session is not None else str(time.monotonic_ns())
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")
        return random.Random(seed).choices(places, [place.weight for place in places])[0]

    async def _continue_response(
        self,
        request: FrozenRequest,
        previous: str,
        session: RecordedSession | None,
        deployment: LiteLLMDeployment,
    ) -> None:
        """Set `previous_response_id` to the provider's own id of the response that is continued."""
        if not deployment.keeps_responses:
            raise InvalidRequest(
                f"the provider of {request.model} keeps no responses: send the whole conversation "
                "as input, without previous_response_id",
                param="previous_response_id",
            )
        stored = await self._sessions.journal.interactions(session.id) if session else []
        for each in stored:
            if each.interaction.id == previous and is_frozen(each.interaction):
                answer = each.interaction.request.get("frozen", {})
                if answer.get("model") == request.model and answer.get("provider_id"):
                    request.params["previous_response_id"] = answer["provider_id"]
                    return
        raise NotFound(
            f"Previous response with id {previous[:80]!r} is not one of this model in this session",
            code="previous_response_not_found",
            param="previous_response_id",
        )

    def _start(
        self,
        request: FrozenRequest,
        deployment: Place,
        session: RecordedSession | None,
        tenant: str | None,
    ) -> FrozenCall:
        self._require_room(session)
        timeout = self._config.frozen.timeout
        kind = AppCall if isinstance(deployment, AppDeployment) else FrozenCall
        call = kind(request, deployment, session, tenant, timeout=timeout, record=self._record)
        self._running.add(call)
        if session is not None:
            session.frozen_calls.add(call)
            session.touch()
        call.start().add_done_callback(lambda _: self._on_done(call))
        return call

    def start_elsewhere(self, call: RouteCall) -> asyncio.Task[None]:
        """Start a call at one of LiteLLM's other inference routes, which outlives its session.

        Raises SessionClosed or TooManyRequests.
        """
        self._require_room(call.session)
        self._running.add(call)
        task = call.start(self._config.frozen.timeout, self._charge)
        task.add_done_callback(lambda _: self._running.discard(call))
        return task

    async def _charge(self, call: RouteCall, cost: float, tokens: int) -> None:
        if call.session is not None:
            call.session.touch()
        self._quotas.charge_tokens(call.tenant, tokens)
        statements = await self.spending.add(call.session, call.tenant, cost)
        await self._sessions.deliveries.commit(*statements)

    def _require_room(self, session: RecordedSession | None) -> None:
        if session is not None:
            session.require_open()
        if len(self._running) >= self._config.frozen.max_calls:
            self.stats.turned_away += 1
            raise TooManyRequests(
                f"{len(self._running)} calls of frozen models are under way on this rank, as many "
                "as frozen.max_calls allows; try again",
                code="too_many_calls",
                retry_after=1,
            )

    def _on_done(self, call: FrozenCall) -> None:
        self._running.discard(call)
        if call.session is not None:
            call.session.frozen_calls.discard(call)
            call.session.touch()
        self.stats.ended[self._label(call.request.model), call.outcome] += 1
        if call.failure is None:
            self.stats.seconds.observe(time.time() - call.created_at)
        elif call.outcome == "failed":
            error = call.failure
            status = error.response.status_code if isinstance(error, Answered) else error.status
            log.warning(
                "a call of the frozen model %s failed with %d %s",
                *(call.request.model, status, error.code),
            )

    async def _record(self, call: FrozenCall, whole: bool) -> None:
        """Count a call's cost, and record the call with its session, if it has one."""
        response, request, stats = call.response, call.request, self.stats
        label = self._label(request.model)
        estimated = not whole or not response.reports_prompt()
        if estimated:
            # A stream that broke off may have reported some usage at its beginning.
            reported = response.tokens()
            counted = await _count(call.deployment, text_in([request.messages, request.tools]))
            output = await _count(call.deployment, text_in(response.message()))
            prompt = reported[0] or ids_in(request.messages) + counted
            response.estimate_usage(prompt, max(reported[1], output))
        cost = call.deployment.cost(request.api, response.usage)
        prompt, output = response.tokens()
        stats.tokens[label, "input"] += prompt
        stats.tokens[label, "output"] += output
        stats.unpriced[label] += cost is None
        stats.usd[label] = stats.usd.get(label, 0.0) + (cost or 0.0)
        self._quotas.charge_tokens(call.tenant, prompt + output)
        statements = await self.spending.add(call.session, call.tenant, cost)
        if call.session is None:
            await self._sessions.deliveries.commit(*statements)
            return
        interaction = _interaction(call, call.session.id, whole=whole)
        if not self._config.sessions.store_content:
            interaction = strip_content(interaction)
        frozen = {
            "api": request.api,
            "model": request.model,
            "usage": response.usage,
            "estimated": estimated,
            "cost_usd": cost,
            "provider_id": response.provider_id,
            "provider_model": response.provider_model,
        }
        interaction.request = {**interaction.request, "frozen": frozen}
        await self._sessions.deliveries.commit(PutInteraction(interaction), *statements)


def _interaction(call: FrozenCall, session_id: str, *, whole: bool) -> Interaction:
    request, response = call.request, call.response
    nothing = np.zeros(0, np.int32)
    record = {"recorded": request.recorded, "role": request.role}
    return Interaction(
        id=response.id,
        session_id=session_id,
        parent_id=None,
        prompt_delta_ids=nothing,
        output_ids=nothing,
        output_logprobs=np.zeros(0, np.float32),
        output_versions=nothing,
        message_delta=request.messages,
        output_message=response.message(),
        finish_reason=response.finish_reason if whole else "abort",
        gconfig=GenerationHyperparameters(),
        model=request.model,
        tools=request.tools,
        untrainable_reason=FROZEN_MODEL,
        request={name: value for name, value in record.items() if value},
        created_at=call.created_at,
    )


async def _count(deployment: Place, text: str) -> int:
    """Return about how many tokens a text has."""
    beginning = text[:_MAX_COUNTED]
    with contextlib.suppress(Exception):
        if len(text) <= _LONG_TEXT:
            return deployment.count(text)
        counted = await asyncio.to_thread(deployment.count, beginning)
        return counted * len(text) // len(beginning)
    return len(text) // 4
