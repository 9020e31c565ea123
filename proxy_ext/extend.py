"""Put a rank on LiteLLM's own app, for a script that serves that app itself."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from any_agent.chat import ChatFormat
from any_agent.config import Config
from any_agent.errors import ConfigError
from proxy_ext import litellm_proxy
from proxy_ext.app import create_app
from proxy_ext.in_process import RankApp, SessionCache
from proxy_ext.service import load_chat

_OURS = ("engine", "session_cache", "waiting", "lease", "ack", "give_back", "admit", "load")


def extend(
    app: FastAPI,
    config: Config,
    *,
    engine_url: str,
    public_url: str,
    rank: int = 0,
    training: bool = True,
    chat: ChatFormat | None = None,
) -> RankApp:
    """Put any-agent's routes, engine and sessions on LiteLLM's app; return the rank behind it.

    ``app`` is ``litellm.proxy.proxy_server.app``, before it serves. It gets the policy's calls, the
    `/rl` routes and `/healthz` in front of its own routes, and `app.engine`, `app.session_cache`
    and what `ProxyWorkflow(app)` needs. Its own routes are served where `litellm.config` names a
    configuration of LiteLLM's, and are 404 without one. ``chat`` is made of `config.model` if it is
    not given; the other arguments are those of `create_app`.

    Raises ConfigError for another app, and for one that is extended already or serves.
    """
    if not litellm_proxy.is_litellms(app):
        raise ConfigError(
            "extend takes LiteLLM's own app: from litellm.proxy.proxy_server import app; for an "
            "app without LiteLLM use proxy_ext.app.create_app"
        )
    if isinstance(getattr(app, "session_cache", None), SessionCache):
        raise ConfigError("LiteLLM's app is extended already: there is one in a process")
    if app.middleware_stack is not None:
        raise ConfigError("LiteLLM's app serves already: extend it before uvicorn runs it")
    config.require_litellm()
    rank_app = create_app(
        config,
        chat or load_chat(config),
        rank=rank,
        engine_url=engine_url,
        public_url=public_url,
        training=training,
    )
    litellm_proxy.close_to_browsers(app)
    app.add_middleware(_InFront, rank_app=rank_app)
    for name in _OURS:
        setattr(app, name, getattr(rank_app, name))
    return rank_app


class _InFront:
    """Answers as the rank does, which sends LiteLLM what it has judged to be LiteLLM's."""

    def __init__(self, app: ASGIApp, rank_app: RankApp) -> None:
        self._litellm = app
        self._rank_app = rank_app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        judged = litellm_proxy.CALLER_SCOPE_KEY in scope
        await (self._litellm if judged else self._rank_app)(scope, receive, send)
