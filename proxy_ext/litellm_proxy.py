"""LiteLLM's proxy with an operator's own configuration (exactly 1.106.2, see the constraints).

Its proxy is module globals, so there is one in a process. `proxy_ext.litellm_policy` has what it
does for the policy's calls, `proxy_ext.litellm_keys` its virtual keys.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from any_agent.config.litellm import (
    POLICY,
    database_url,
    names_in,
    policy_names_in,
    read_litellm_config,
    require_other_names,
)
from any_agent.errors import ConfigError
from proxy_ext import litellm_keys
from proxy_ext.litellm_shim import quieten, usd_of

log = logging.getLogger(__name__)

CALLER_SCOPE_KEY = "any_agent.litellm_caller"
"""The key of the :class:`LiteLLMCaller` in a request's ASGI scope."""
CALL_ID = b"x-litellm-call-id"
"""The header by which LiteLLM's callbacks, and `facts_of`, know a call."""
BEARER = b"Bearer sk-any-agent-has-judged-the-key"
"""The authorization that LiteLLM's app gets in the place of a client's key."""
_LIMITS = ("rpm", "tpm", "max_parallel_requests")
_ONE_SERVER = ("redis", "rediss", "unix")
"""Schemes of the URLs that name one Redis server."""
_expected: dict[str, AnswerFacts] = {}
"""The answers that calls under way wait for, by the call's id."""
_NOT_SERVED = ("CORSMiddleware",)
"""Middlewares that are left out: any page in a browser might call the service."""


@dataclass(frozen=True, slots=True)
class LiteLLMCaller:
    """The holder of a key, as LiteLLM is told of it."""

    admin: bool
    identity: str
    """The key's name in logs and limits; it is no secret."""
    tenant: str | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Facts about the session, for callbacks."""

    @property
    def virtual_key(self) -> str | None:
        """The hash of the virtual key that the call is for, if it is for one."""
        return litellm_keys.hash_in(self.tenant)


@dataclass(slots=True)
class AnswerFacts:
    """Facts about an answer of a provider that LiteLLM's app leaves out of it."""

    model: str | None = None
    """The model as the provider calls it."""
    streamed: bool = False
    """True if LiteLLM has put a stream together."""
    usage: dict[str, Any] | None = None
    """The usage, of a stream in the form of chat completions; None if the provider reports none:
    LiteLLM's own would be an estimate."""


@dataclass(frozen=True, slots=True)
class SharedRedis:
    """The service's own Redis, in which LiteLLM may count for all ranks."""

    url: str
    namespace: str
    """The beginning of the keys there."""


def load_proxy(path: str, *, redis: SharedRedis | None = None) -> Any:
    """Import LiteLLM's app, which reads the configuration at its start-up.

    With ``redis`` its limits, cooldowns and budgets are counted there, unless the configuration or
    the environment names a Redis for LiteLLM.
    """
    # Prices come from the package: no start waits for a network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_LOG", "ERROR")
    os.environ["CONFIG_FILE_PATH"] = os.path.abspath(path)
    data = read_litellm_config(path)
    if url := database_url(data, os.environ):
        # LiteLLM's command line does the same; its app reads nothing but the variable.
        os.environ["DATABASE_URL"] = url
    # LiteLLM requires a master key, which is never asked for: `_identify` says who calls.
    os.environ.setdefault("LITELLM_MASTER_KEY", f"sk-{secrets.token_hex(24)}")
    import litellm
    from litellm.proxy import proxy_server

    # LiteLLM takes an entry of a provider that it knows alone; `adopt` removes it.
    litellm.provider_list.append(POLICY.partition("/")[0])
    # Hosts that a client names are checked before LiteLLM fetches from them.
    litellm.user_url_validation = True
    proxy_server.general_settings["disable_model_info_refresh"] = True
    quieten()
    if redis is not None and not names_redis(data):
        _count_in(redis)
    close_to_browsers(proxy_server.app)
    return proxy_server.app


def names_redis(data: Mapping[str, Any]) -> bool:
    """Return whether a configuration, or the environment, names a Redis for LiteLLM's counters."""
    from litellm.proxy.proxy_server import environment_has_redis_connection_target

    general, router, settings = (
        data.get(section) or {}
        for section in ("general_settings", "router_settings", "litellm_settings")
    )
    cache = (settings.get("cache_params") or {}).get("type")
    return bool(
        general.get("coordination_redis")
        or router.get("redis_url")
        or router.get("redis_host")
        or (settings.get("cache") and cache == "redis")
        or environment_has_redis_connection_target()
    )


def _count_in(redis: SharedRedis) -> None:
    """Have LiteLLM count in the service's Redis; without it each rank enforces its share."""
    if urlsplit(redis.url).scheme not in _ONE_SERVER:
        log.info(
            "LiteLLM does not count in server.journal, which is a cluster or behind Sentinels: "
            "general_settings.coordination_redis names a Redis for it"
        )
        return
    from litellm.proxy import proxy_server

    options = {"url": redis.url, "namespace": redis.namespace}
    try:
        cache = proxy_server.build_redis_usage_cache(options)
        # A login may be one for the journal's commands and keys alone.
        cache.redis_client.set(f"{redis.namespace}:try", 1, ex=1)
    except Exception as error:
        log.warning("LiteLLM cannot count in server.journal (%s)", type(error).__name__)
        return
    proxy_server._attach_redis_usage_cache(cache, enable_redis_auth_cache=False)
    proxy_server._set_redis_usage_cache(cache)


def is_litellms(app: Any) -> bool:
    """Return whether this is LiteLLM's own app."""
    from litellm.proxy import proxy_server

    return app is proxy_server.app


def close_to_browsers(app: Any) -> None:
    """Leave out the middlewares that open LiteLLM's app to pages of other origins."""
    app.user_middleware[:] = [m for m in app.user_middleware if m.cls.__name__ not in _NOT_SERVED]


def adopt(path: str, policy: frozenset[str], *, ranks: int) -> None:
    """Take over the proxy that has read its configuration; ConfigError for what contradicts ours.

    ``policy``: the policy's names. ``ranks``: the service's number of ranks, each of which has a
    share of the limits that no Redis shares.
    """
    from litellm.proxy import proxy_server

    quieten()
    _note_answers()
    proxy_server.user_custom_auth = _identify
    # Included files are read by now.
    state = proxy_server.proxy_config.get_config_state()
    require_other_names(names_in(state), policy, path)
    if others := set(policy_names_in(state)) - policy:
        raise ConfigError(
            f"a file that {path} includes calls the policy {min(others)}: write the entry with "
            f"model: {POLICY} into {path} itself"
        )
    router = proxy_server.llm_router
    if router is None:
        return
    for deployment in list(router.model_list):
        if deployment["litellm_params"]["model"] == POLICY:
            router.delete_deployment(deployment["model_info"]["id"])
    _name_unpriced(router)
    if ranks == 1:
        return
    if router.cache.redis_cache is not None:
        log.info("LiteLLM's limits, cooldowns and budgets are counted in Redis for all ranks")
        return
    shared = 0
    for deployment in router.model_list:
        for part in (deployment, deployment.get("litellm_params") or {}):
            for name in _LIMITS:
                if isinstance(part.get(name), int):
                    part[name] = math.ceil(part[name] / ranks)
                    shared += 1
    log.info(
        "LiteLLM has no Redis (server.journal or router_settings.redis_host): each of %d "
        "ranks enforces its share of %d rpm, tpm and parallel limits, and has cooldowns and a "
        "cache of its own",
        *(ranks, shared),
    )


def _name_unpriced(router: Any) -> None:
    """Log the models whose calls no cap will count."""
    free = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    unpriced = [
        deployment["model_name"]
        for deployment in router.model_list
        if price(deployment["model_info"]["id"], "chat", free) is None
    ]
    if unpriced:
        log.warning(
            "no price is known for %s: the cost of their calls is not counted, and no cap "
            "(frozen.session_usd, frozen.tenant_usd) stops them; set input_cost_per_token and "
            "output_cost_per_token in their litellm_params",
            ", ".join(dict.fromkeys(unpriced)),
        )


async def _identify(request: Any, api_key: str) -> Any:
    """Tell LiteLLM who calls, as the rank has found; no other request reaches its app."""
    from litellm.proxy._types import LitellmUserRoles, UserAPIKeyAuth
    from litellm.proxy.common_utils.http_parsing_utils import read_request_body

    caller: LiteLLMCaller = request.scope[CALLER_SCOPE_KEY]
    if caller.virtual_key is not None:
        body = await read_request_body(request)
        known = await litellm_keys.authorized(caller.virtual_key, request, body)
        known.metadata = {**(known.metadata or {}), **caller.metadata}
        return known
    role = LitellmUserRoles.PROXY_ADMIN if caller.admin else LitellmUserRoles.INTERNAL_USER
    return UserAPIKeyAuth(
        api_key=caller.identity,
        token=caller.identity,
        key_alias=caller.identity,
        user_id=caller.tenant or caller.identity,
        user_role=role,
        metadata=dict(caller.metadata),
    )


@contextmanager
def facts_of(call_id: str) -> Iterator[AnswerFacts]:
    """Yield what LiteLLM says, meanwhile, of the answer to a call with this id."""
    facts = _expected[call_id] = AnswerFacts()
    try:
        yield facts
    finally:
        del _expected[call_id]


def _note_answers() -> None:
    """Have LiteLLM fill in the facts about answers, before it has passed on their ends."""
    import litellm
    from litellm.integrations.custom_logger import CustomLogger

    class Noting(CustomLogger):  # type: ignore[misc]
        async def async_post_call_success_deployment_hook(
            self, request_data: dict[str, Any], response: Any, call_type: Any
        ) -> None:
            facts = _expected.get(str(request_data.get("litellm_call_id")))
            if facts is not None:
                facts.model = _model_of(response) or facts.model
                facts.usage = _plain(getattr(response, "usage", None))

    build = litellm.stream_chunk_builder

    def noted(chunks: Any, *args: Any, **kwargs: Any) -> Any:
        response = build(chunks, *args, **kwargs)
        call = kwargs.get("logging_obj")
        facts = _expected.get(getattr(call, "litellm_call_id", ""))
        if facts is not None and response is not None:
            facts.streamed = True
            facts.model = _model_of(response) or facts.model
            reported = any(_reports_usage(chunk) for chunk in chunks)
            facts.usage = _plain(response.usage) if reported else None
        return response

    litellm.callbacks.insert(0, Noting())
    litellm.stream_chunk_builder = noted


def _model_of(response: Any) -> str | None:
    # The event that ends a stream of the Responses API has the response in it.
    response = getattr(response, "response", response)
    hidden = getattr(response, "_hidden_params", None) or {}
    named = hidden.get("provider_response_model") or getattr(response, "model", None)
    if named is None and isinstance(response, dict):
        named = response.get("model")
    return named if isinstance(named, str) else None


def _plain(usage: Any) -> dict[str, Any] | None:
    """Return a usage as data, without LiteLLM's own cost."""
    if hasattr(usage, "model_dump"):
        usage = usage.model_dump(exclude_none=True)
    return {k: v for k, v in usage.items() if k != "cost"} if isinstance(usage, dict) else None


def _reports_usage(chunk: Any) -> bool:
    usage = chunk.get("usage") if isinstance(chunk, dict) else getattr(chunk, "usage", None)
    if isinstance(usage, dict):
        return bool(usage.get("prompt_tokens"))
    return bool(getattr(usage, "prompt_tokens", 0))


def knows(name: str) -> bool:
    """Return whether LiteLLM has a model, an alias or a pattern for a name."""
    from litellm.proxy import proxy_server

    router = proxy_server.llm_router
    return router is not None and bool(router.get_model_list(model_name=name))


def can_report_usage(name: str) -> bool:
    """Return whether each place of a model takes a request for the usage of its stream."""
    from litellm.proxy import common_request_processing, proxy_server

    supports = common_request_processing._model_deployments_support_stream_options
    return bool(supports(name, proxy_server.llm_router, None))


def price(deployment_id: str | None, api: str, usage: Mapping[str, Any]) -> float | None:
    """Return the USD of a usage, in the API's form, at a deployment; None if it is not known."""
    import litellm
    from litellm.proxy import proxy_server

    router = proxy_server.llm_router
    deployment = router.get_deployment(deployment_id) if router and deployment_id else None
    if deployment is None:
        return None
    own = litellm.model_cost.get(deployment_id or "", {})
    try:
        model, provider, _, _ = litellm.get_llm_provider(
            deployment.litellm_params.model,
            custom_llm_provider=deployment.litellm_params.custom_llm_provider,
            api_base=deployment.litellm_params.api_base,
        )
        known = deployment_id if own.get("input_cost_per_token") is not None else model
        return usd_of(str(known), provider, api, usage)
    except Exception:
        return None


def refusal(path: str, error: BaseException) -> ConfigError:
    """Return the error of a configuration that LiteLLM does not take, with its message."""
    text = str(getattr(error, "message", None) or error) or type(error).__name__
    return ConfigError(f"LiteLLM refuses {path}: {text[:500]}")
