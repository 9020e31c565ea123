"""Agents that open no sessions, and what becomes of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai

from proxy_ext.sessions.session import RecordedSession
from tests.support.proxy import LIMIT, Proxy
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import over as over

GRADER = "tests.support.graders.by_length"
SYSTEM = {"role": "system", "content": "You are brief."}
ONE = [SYSTEM, {"role": "user", "content": "Say a number."}]
MORE = {"role": "user", "content": "Another one."}
KEY = "sk-anything"

Messages = Sequence[dict[str, Any]]


def settings(*more: str, grader: str = GRADER) -> tuple[str, ...]:
    """Each conversation is a group of its own, so that nothing waits for another."""
    alone = "sessions.implicit_group_size=1"
    return ("sessions.implicit=true", f"sessions.grader={grader}", alone, *more)


def client(proxy: Proxy, key: str = KEY, **options: Any) -> openai.AsyncOpenAI:
    """As an agent makes it, from its environment alone."""
    options = {"max_retries": 0, "timeout": LIMIT} | options
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", api_key=key, **options)


async def says(
    proxy: Proxy, messages: Messages, key: str = KEY, **fields: Any
) -> tuple[dict[str, Any], str]:
    """The answer's message, and its session's id."""
    response = await proxy.call(key, messages, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"], response.headers["x-any-agent-session"]


def will_say(engine: ScriptedEngine, proxy: Proxy, *texts: str) -> None:
    chat = proxy.service.completer.chat
    for text in texts:
        engine.say([*chat.tokenizer.encode(text), chat.stop_token_ids[0]])


def session(proxy: Proxy, id: str) -> RecordedSession:
    return proxy.service.sessions.live[id]


async def idle(proxy: Proxy, id: str) -> dict[str, Any]:
    """What is said of a session once nobody has called for long enough."""
    session(proxy, id).active -= proxy.service.config.sessions.implicit_idle_timeout + 1
    proxy.service.sessions.watch(session(proxy, id))
    return await over(proxy, id)
