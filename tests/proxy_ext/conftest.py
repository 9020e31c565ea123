from __future__ import annotations

from tests.support.proxy_fixtures import chat, engine, proxy, restart, start

__all__ = ["chat", "engine", "proxy", "restart", "start"]
