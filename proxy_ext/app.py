"""One rank's app: our routes, and LiteLLM's proxy app behind an allowlist, in one process."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from any_agent.auth.access import run_dir_of
from any_agent.chat import ChatFormat
from any_agent.config import Config
from any_agent.engine.model_fingerprint import ModelFingerprint
from any_agent.errors import (
    AnyAgentError,
    ConfigError,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    ServiceUnavailable,
    StartupError,
)
from any_agent.rundir.registry import rank_name
from any_agent.runtime.metrics import CONTENT_TYPE, merged
from any_agent.types import SessionMode, SessionState
from proxy_ext import litellm_shim
from proxy_ext.api import model_routes, responses, rl
from proxy_ext.api.model_routes import ModelRoutes
from proxy_ext.api.openapi.build import describe
from proxy_ext.api.rl.strict_body import Anyone
from proxy_ext.frozen.frozen_models import require_prices
from proxy_ext.idempotency import ReplayedAnswer
from proxy_ext.in_process import RankApp
from proxy_ext.litellm_app import ConfiguredLiteLLMApp
from proxy_ext.litellm_gate import LiteLLMGate
from proxy_ext.litellm_proxy import SharedRedis
from proxy_ext.metrics import exposition
from proxy_ext.service import open_service
from proxy_ext.web import permissions
from proxy_ext.web.exchange import error_response

log = logging.getLogger(__name__)

_ENGINE_ANSWERS_WITHIN = 3.0  # seconds


class Health(BaseModel):
    """The load of one rank; the router answers with those of its ranks."""

    status: Literal["ok"] = "ok"
    rank: int
    """The number of the rank in its service."""
    open: int
    """Number of open sessions."""
    open_train: int
    """Number of open train sessions."""
    buffered: int
    """Number of live sessions that are not open: most wait for the trainer, or it has them."""
    calls: int
    """Number of model calls under way."""
    engine_up: bool
    """False while the rank's engine is dead or hangs."""
    quotas_exact: bool
    """True if tenants' quotas are counted once for all ranks; False if each rank enforces its share
    of them: without `server.journal`, or while its Redis does not answer."""


class Readiness(BaseModel):
    status: Literal["ready"] = "ready"
    version: int
    litellm: str | None = None
    """The reason that LiteLLM's models are not served yet, if an operator's configuration has any;
    None otherwise."""


# FastAPI takes a quarter of a second to read the routes' signatures, so all apps of a process share
# them; each route finds its service in the request.
_routes = APIRouter()
for _prefix in ("/v1", ""):
    for _part in (model_routes, responses):
        _routes.include_router(_part.router, prefix=_prefix, include_in_schema=bool(_prefix))
_routes.include_router(rl.router)


@_routes.get("/healthz")
async def healthz(service: Anyone) -> Health:
    """The process lives; the answer shows its load."""
    live = list(service.sessions.live.values())
    opened = [session for session in live if session.state is SessionState.OPEN]
    return Health(
        rank=service.rank,
        open=len(opened),
        open_train=sum(session.mode is SessionMode.TRAIN for session in opened),
        buffered=len(live) - len(opened),
        calls=len(service.calls),
        engine_up=not service.engine.away,
        quotas_exact=service.quotas.exact,
    )


@_routes.get("/readyz", response_model_exclude_none=True)
async def readyz(service: Anyone) -> Readiness:
    """The engine answers too, and the store takes writes; 503 otherwise."""
    if service.journal.stats.full:
        raise ServiceUnavailable(
            "the journal's disk is full: calls get 507 until there is space; free some",
            code="store_full",
            retry_after=10,
        )
    try:
        async with asyncio.timeout(0 if service.engine.away else _ENGINE_ANSWERS_WITHIN):
            await service.engine.info()
    except TimeoutError:
        raise EngineUnavailable(
            "the engine does not answer: calls wait for it; try again", retry_after=2
        ) from None
    litellm = service.litellm
    return Readiness(
        version=service.run.version, litellm=None if litellm is None else litellm.problem
    )


@_routes.get("/metrics", response_class=Response)
async def show_metrics(service: Anyone) -> Response:
    """The rank's metrics, for Prometheus, and those of LiteLLM's callback."""
    texts = [exposition(service).render()]
    if service.litellm is not None:
        texts += await service.litellm.metrics(rank_name(service.rank))
    if service.events is not None:
        texts.append(await service.events.metrics())
    return Response(merged(text.decode() for text in texts), media_type=CONTENT_TYPE)


def _shared_redis(config: Config) -> SharedRedis | None:
    """Return where LiteLLM may count for all ranks, if the service has a Redis."""
    if config.server.journal is None:
        return None
    name = run_dir_of(config).full_name
    return SharedRedis(config.server.journal.get_secret_value(), f"any-agent:{name}:litellm")


def create_app(
    config: Config,
    chat: ChatFormat,
    *,
    rank: int,
    engine_url: str,
    public_url: str,
    training: bool,
    engine_wait: float = 0.0,
    shape: ModelFingerprint | None = None,
    provider: litellm_shim.LiteLLMProvider | None = None,
    journal_url: str | None = None,
) -> RankApp:
    """Return the ASGI app of a rank.

    ``shape`` is the fingerprint of the model that the engine must have; ``journal_url`` replaces
    the run folder's journal. ``provider`` is for tests. ConfigError for frozen models that
    cannot be used.
    """
    configured = None
    if config.litellm.config is not None:
        configured = ConfiguredLiteLLMApp(
            config.litellm.config,
            frozenset((config.model.name, *config.model.policy_names)),
            ranks=config.server.ranks,
            guardrails=config.litellm.policy_guardrails,
            vetoes=config.litellm.policy_vetoes,
            redis=_shared_redis(config),
            on_refused=lambda error: rank_app.refuse(error),
        )
    if provider is None:
        provider = litellm_shim.load_provider(config.frozen.model_list)
    if provider is not None:
        require_prices(config.frozen, provider)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if configured is not None:
                await stack.enter_async_context(configured.lifespan())
            opened = open_service(
                config,
                chat,
                rank=rank,
                engine_url=engine_url,
                public_url=public_url,
                training=training,
                engine_wait=engine_wait,
                shape=shape,
                provider=provider,
                litellm=configured,
                journal_url=journal_url,
            )
            try:
                service = await stack.enter_async_context(opened)
            except (ConfigError, StartupError) as error:
                rank_app.refused = error
                raise
            app.state.service = service
            rank_app.on_started(service)
            # The libraries' 700,000 objects live as long as the process: a full collection over
            # them would stop every stream for a third of a second.
            gc.collect()
            gc.freeze()
            try:
                yield
            finally:
                rank_app.on_stopped()

    app = FastAPI(
        title="any-agent",
        summary="Makes any OpenAI-compatible agent trainable by reinforcement learning.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        routes=list(_routes.routes),
    )
    ours = ModelRoutes(app)
    _add_error_handlers(app)
    permissions.check_routes(app.routes)
    describe(app)
    rank_app = RankApp(
        ours,
        auth=lambda: app.state.service.auth,
        audit=lambda: app.state.service.audit,
        server=config.server,
        gate=None if configured is None else LiteLLMGate(configured, lambda: app.state.service),
    )
    return rank_app


def _add_error_handlers(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        return _answer_to(error, request.url.path)

    for kind in (AnyAgentError, ReplayedAnswer, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _answer_to(error: Exception, path: str) -> Response:
    match error:
        case ReplayedAnswer():
            return error.response
        case AnyAgentError():
            known = error
        case RequestValidationError():
            known = _validation_error(error)
        case HTTPException(status_code=404):
            known = NotFound(f"there is no route {path[:200]}")
        case HTTPException(__cause__=None):
            return error_response(InvalidRequest(str(error.detail)), path, error.status_code)
        case HTTPException(__cause__=cause):
            # FastAPI wraps errors that occur while it reads a body.
            known = cause if isinstance(cause, AnyAgentError) else _invalid_json()
        case _:
            known = AnyAgentError("the service failed; its log has the reason")
    return error_response(known, path)


def _validation_error(error: RequestValidationError) -> InvalidRequest:
    first = error.errors()[0]
    # A field's name may be as long as a body.
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query"))[:200]
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        return _invalid_json()
    if first["type"] == "missing" and not where:
        return InvalidRequest("the body is missing: send a JSON object")
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field {where}; remove it", param=where)
    return InvalidRequest(f"{where}: {message}" if where else message, param=where or None)


def _invalid_json() -> InvalidRequest:
    return InvalidRequest("the body is not valid JSON; send a JSON object", code="invalid_json")
