"""Agents that open no sessions: each conversation becomes one, which the grader rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from any_agent.types import SessionState
from proxy_ext.sessions.session import Session
from tests.fakes.scripted_engine import ScriptedEngine
from tests.proxy_ext.conftest import Start
from tests.proxy_ext.proxy_lab import LIMIT, Proxy, until

GRADER = "tests.proxy_ext.graders.by_length"
SYSTEM = {"role": "system", "content": "You are brief."}
ONE = [SYSTEM, {"role": "user", "content": "Say a number."}]
MORE = {"role": "user", "content": "Another one."}
ADMIN = "the-admin-key-of-these-tests"

Messages = Sequence[dict[str, Any]]


def settings(*more: str, grader: str = GRADER) -> tuple[str, ...]:
    each = "sessions.implicit_group_size=1"
    return ("sessions.implicit=true", f"sessions.grader={grader}", each, *more)


@pytest.fixture
async def proxy(start: Start) -> Proxy:
    """One that needs no key, with room for many sessions."""
    proxy = await start(*settings())
    await proxy.admit(100)
    return proxy


def client(proxy: Proxy, **options: Any) -> openai.AsyncOpenAI:
    """As an agent makes it, from its environment alone."""
    options = {"api_key": "sk-anything", "max_retries": 0} | options
    return openai.AsyncOpenAI(base_url=f"{proxy.url}/v1", timeout=LIMIT, **options)


async def says(proxy: Proxy, messages: Messages, **fields: Any) -> tuple[dict[str, Any], str]:
    """The answer's message, and its session's id."""
    response = await proxy.call("sk-anything", messages, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"], response.headers["x-any-agent-session"]


def session(proxy: Proxy, id: str) -> Session:
    return proxy.service.sessions.live[id]


async def idle(proxy: Proxy, id: str) -> dict[str, Any]:
    """What is said of a session once nobody has called for long enough."""
    session(proxy, id).active -= proxy.service.config.sessions.implicit_idle_timeout + 1
    proxy.service.sessions.watch(session(proxy, id))

    async def over() -> dict[str, Any] | None:
        await proxy.service.expiry.sweep()
        now = dict((await proxy.http.get(f"/rl/v1/sessions/{id}")).json())
        return now if now["state"] not in ("open", "awaiting_reward") else None

    return dict(await until(over, "it ends"))


async def test_a_conversation_is_a_session(proxy: Proxy) -> None:
    async with client(proxy) as agent:
        messages: list[Any] = list(ONE)
        for _ in range(3):
            done = await agent.chat.completions.create(
                model="gpt-4o", messages=messages, max_tokens=8, metadata={"plus": "2"}
            )
            messages += [done.choices[0].message.to_dict(), MORE]
    ids = set(proxy.service.sessions.live)
    assert len(ids) == 1
    (id,) = ids
    tree = session(proxy, id).tree
    assert [str(i.continuation) for i in tree] == ["root", "exact", "exact"]
    assert session(proxy, id).row.metadata == {"plus": "2"}
    assert session(proxy, id).row.opened_by == "implicit: anyone"
    ended = await idle(proxy, id)
    assert (ended["state"], ended["final_reward"]) == ("finalized", 8.0)
    (trajectory,) = await proxy.lease()
    assert trajectory.final_reward == 8
    assert proxy.service.implicit.calls == {"opened": 1, "continued": 2}
