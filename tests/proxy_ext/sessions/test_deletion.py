"""Deletion and veto: content is gone from the disk, and nothing that training needs is."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from proxy_ext.journal import EraseContent
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import finalize, info, unwritable

CANARY = "canary-in-the-coal-mine"
MESSAGES = [{"role": "user", "content": CANARY}]


def found_on_disk(proxy: Proxy) -> list[str]:
    """The journal's files that hold the canary."""
    config = proxy.service.config
    files = [path for path in config.root.rglob("*") if path.is_file()]
    assert any(path.name.startswith("rank-0") for path in files)
    return [path.name for path in files if CANARY.encode() in path.read_bytes()]


async def begun(proxy: Proxy, **fields: Any) -> dict[str, Any]:
    session = await proxy.open(metadata={"secret": CANARY}, **fields)
    await proxy.complete(session["api_key"], MESSAGES)
    for value in ("up", None):
        await proxy.client.feedback(value, text=CANARY, api_key=session["api_key"])
    return session


async def finalized(proxy: Proxy, **fields: Any) -> dict[str, Any]:
    session = await begun(proxy, **fields)
    await finalize(proxy, session, final_reward=1)
    return session


async def delete(proxy: Proxy, session: dict[str, Any], **headers: str) -> httpx.Response:
    return await proxy.http.delete(f"/rl/v1/sessions/{session['session_id']}", headers=headers)


async def ack(proxy: Proxy, session: dict[str, Any], step: int | None) -> None:
    id = session["session_id"]
    body = {"owner": "trainer", "trained": [id], "step": step}
    assert (await proxy.http.post("/rl/v1/ack", json=body)).status_code == 200


async def test_deleted_content_is_gone_from_the_disk(proxy: Proxy, start: Start) -> None:
    session = await finalized(proxy)
    assert found_on_disk(proxy)
    key = {"idempotency-key": "erase-1"}
    first, second = await asyncio.gather(delete(proxy, session, **key), delete(proxy, session))
    assert first.status_code == 200, first.text
    now = first.json()
    assert (now["state"], now["reason"], now["content"]) == ("rejected", "deleted", "deleted")
    assert (now["interactions"], now["rewards"], now["final_reward"]) == (0, {}, 2)
    # Twice does no harm.
    assert now == second.json() == (await delete(proxy, session)).json()
    again = await delete(proxy, session, **key)
    assert (again.content, again.headers["idempotent-replayed"]) == (first.content, "true")
    assert found_on_disk(proxy) == []
    assert await proxy.lease() == []
    other = await start()
    shown = await info(other, session)
    assert (shown["state"], shown["content"], shown["interactions"]) == ("rejected", "deleted", 0)
    given = [(one["name"], one["value"], one["text"]) for one in shown["reward_history"]]
    assert given == [("feedback", 1, None), (None, 1, None)], "rewards stay without their words"
    assert found_on_disk(other) == []
    refusal(await other.call(session["api_key"]), 410, "session_closed")


async def test_a_call_under_way_at_a_deletion_leaves_nothing(
    proxy: Proxy, engine: ScriptedEngine
) -> None:
    session = await begun(proxy)
    go = engine.hold(1)
    call = asyncio.create_task(proxy.call(session["api_key"], MESSAGES))
    await until(lambda: engine.running)
    response = await delete(proxy, session)
    assert response.json()["state"] == "aborted"
    go.set()
    assert (await call).status_code == 410
    assert found_on_disk(proxy) == []
    assert await proxy.recorded(session["session_id"]) == []


async def test_a_session_that_training_needs_is_not_deleted(proxy: Proxy) -> None:
    session, unknown = await finalized(proxy), await proxy.finished_session()
    for _ in range(2):
        assert len(await proxy.lease()) == 1
    refusal(await delete(proxy, session), 409, "in_training")
    await ack(proxy, session, step=3)
    await ack(proxy, unknown, step=None)
    # The oldest kept checkpoint is of step 2: a resume from it trains on step 3 again.
    await proxy.client.set_run("training", step=3, checkpoint=None, oldest_step=2)
    error = refusal(await delete(proxy, session), 409, "in_training")
    assert error["state"] == "trained"
    assert found_on_disk(proxy)
    await proxy.client.set_run("training", step=4, checkpoint=None, oldest_step=3)
    now = (await delete(proxy, session)).json()
    assert (now["state"], now["step"], now["content"]) == ("trained", 3, "deleted")
    assert found_on_disk(proxy) == []
    # Whether a step of unknown number is made again, nobody knows.
    refusal(await delete(proxy, unknown), 409, "in_training")


async def test_a_session_that_a_killed_trainer_had_is_not_deleted(
    proxy: Proxy, start: Start
) -> None:
    """The step that it was at may be made again; when training has ended, none will be."""
    session, other = await finalized(proxy), await finalized(proxy)
    assert [len(await proxy.lease(owner="killed")) for _ in range(2)] == [1, 1]
    await proxy.admit(1000, owner="next")
    for again in (proxy, await start()):
        refusal(await delete(again, session), 409, "in_training")
        veto = await again.post(f"/rl/v1/sessions/{session['session_id']}/veto", {})
        refusal(veto, 409, "in_training")
    await again.client.set_run("finished", step=1, checkpoint=None)
    assert (await delete(again, session)).json()["reason"] == "deleted"
    veto = await again.post(f"/rl/v1/sessions/{other['session_id']}/veto", {})
    assert veto.json()["state"] == "rejected"


async def test_a_deleted_session_is_not_replayed(proxy: Proxy) -> None:
    session = await finalized(proxy)
    await proxy.lease()
    await ack(proxy, session, step=1)
    await proxy.client.set_run("training", step=1, checkpoint=None, oldest_step=1)
    body = {"owner": "trainer", "session_ids": [session["session_id"]], "replay": True}
    erased, replayed = await asyncio.gather(
        delete(proxy, session), proxy.http.post("/rl/v1/lease", json=body)
    )
    # Whichever was first, the other one is refused.
    assert sorted((erased.status_code, replayed.status_code)) == [200, 409]
    if erased.status_code == 200:
        later = await proxy.http.post("/rl/v1/lease", json=body)
        refusal(later, 409, "not_replayable")


async def test_a_deletion_that_cannot_be_written_changes_nothing(proxy: Proxy) -> None:
    session = await finalized(proxy)
    with unwritable(proxy.service.journal, EraseContent):
        assert (await delete(proxy, session)).status_code == 503
    (trajectory,) = await proxy.lease()
    assert len(trajectory.interactions) == 1


async def test_an_exported_session_can_be_deleted(proxy: Proxy) -> None:
    """Whoever exported it trains elsewhere: no resume of this run asks for it."""
    session = await finalized(proxy)
    await proxy.export(session["session_id"])
    body = {"owner": "export", "trained": [session["session_id"]]}
    assert (await proxy.http.post("/rl/v1/ack", json=body)).status_code == 200
    assert (await delete(proxy, session)).json()["state"] == "trained"
    assert not found_on_disk(proxy)
