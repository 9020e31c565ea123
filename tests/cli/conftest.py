from __future__ import annotations

from tests.support.proxy_fixtures import chat, engine, proxy, start
from tests.support.sdk_fixtures import serve, served

__all__ = ["chat", "engine", "proxy", "serve", "served", "start"]
