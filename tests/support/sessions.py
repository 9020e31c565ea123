"""Sessions of a proxy under test: steps of their lives, and journals that fail or wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from any_agent.errors import StoreUnavailable
from tests.support.proxy import Proxy
from tests.support.scripted_engine import ScriptedEngine
from tests.support.waiting import until


async def info(proxy: Proxy, session: dict[str, Any] | str) -> dict[str, Any]:
    """What is said of a session, by the answer to its opening or by its id."""
    id = session if isinstance(session, str) else session["session_id"]
    response = await proxy.http.get(f"/rl/v1/sessions/{id}")
    assert response.status_code == 200, response.text
    return dict(response.json())


async def played(proxy: Proxy, **fields: Any) -> dict[str, Any]:
    """A session with one call, whose id is its ``completion``."""
    session = await proxy.open(**fields)
    return {**session, "completion": (await proxy.complete(session["api_key"]))["id"]}


async def finalize(proxy: Proxy, session: dict[str, Any], **body: Any) -> dict[str, Any]:
    response = await proxy.post("/rl/v1/finalize", body, session["api_key"])
    assert response.status_code == 200, response.text
    return dict(response.json())


async def awaiting(proxy: Proxy, deadline: float | None = None, **fields: Any) -> dict[str, Any]:
    """A session with one call that awaits its reward."""
    session = await played(proxy, **fields)
    body = {"await_reward": True} | ({"deadline": deadline} if deadline is not None else {})
    assert (await finalize(proxy, session, **body))["state"] == "awaiting_reward"
    return session


async def abort(proxy: Proxy, session: dict[str, Any], **body: Any) -> dict[str, Any]:
    path = f"/rl/v1/sessions/{session['session_id']}/abort"
    response = await proxy.post(path, body, session["api_key"])
    assert response.status_code == 200, response.text
    return dict(response.json())


async def over(proxy: Proxy, session: dict[str, Any] | str) -> dict[str, Any]:
    """What is said of a session once it is neither open nor awaits its reward."""

    async def ended() -> dict[str, Any] | None:
        await proxy.service.expiry.sweep()
        now = await info(proxy, session)
        return now if now["state"] not in ("open", "awaiting_reward") else None

    return dict(await until(ended, "it ends"))


async def slots(proxy: Proxy) -> tuple[int, int, int]:
    now = await proxy.capacity()
    return now["admitted"], now["reserved"], now["running"]


async def update(proxy: Proxy, engine: ScriptedEngine, version: int) -> None:
    """New weights, as the trainer brings them."""
    await proxy.client.pause(ttl=60)
    engine.weight_version = str(version)
    await proxy.client.publish_version(version=version, path="/w", step=version)
    await proxy.client.resume()


@contextmanager
def unwritable(journal: Any, *kinds: type) -> Iterator[None]:
    """Let the journal take no commit, or none with a statement of these kinds."""
    commit = journal.commit

    async def full(*statements: Any) -> None:
        if not kinds or any(isinstance(statement, kinds) for statement in statements):
            raise StoreUnavailable("no space left", retry_after=1)
        await commit(*statements)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "commit", full)
        yield


def hold_commits(journal: Any, patch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Let commits wait: that one has begun, and that they may go on."""
    commit, begun, go = journal.commit, asyncio.Event(), asyncio.Event()

    async def slow(*statements: Any) -> None:
        begun.set()
        await go.wait()
        await commit(*statements)

    patch.setattr(journal, "commit", slow)
    return begun, go


def count_polls(proxy: Proxy, patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the trainers' polls that wait for a group."""
    ready = proxy.service.sessions.ready
    wait, waiting = ready.wait, Counter[str]()

    async def counted() -> bool:
        waiting["now"] += 1
        try:
            return bool(await wait())
        finally:
            waiting["now"] -= 1

    patch.setattr(ready, "wait", counted)
    return lambda: waiting["now"]
