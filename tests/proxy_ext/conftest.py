from __future__ import annotations

from tests.support.proxy_fixtures import chat, engine, proxy, restart, start
from tests.support.redis_fixtures import server, shared_server

__all__ = ["chat", "engine", "proxy", "restart", "server", "shared_server", "start"]
