from __future__ import annotations

from tests.support.sdk_fixtures import chat, engine, serve, served

__all__ = ["chat", "engine", "serve", "served"]
