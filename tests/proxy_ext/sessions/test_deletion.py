"""Deletion and veto: content is gone from the disk, and nothing that training needs is."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from any_agent.errors import StoreUnavailable
from proxy_ext.journal import EraseContent, Statement
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine

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
    return session


async def finalized(proxy: Proxy, **fields: Any) -> dict[str, Any]:
    session = await begun(proxy, **fields)
    response = await proxy.post("/rl/v1/finalize", {"final_reward": 1}, session["api_key"])
    assert response.status_code == 200, response.text
    return session


async def delete(proxy: Proxy, session: dict[str, Any], **headers: str) -> httpx.Response:
    return await proxy.http.delete(f"/rl/v1/sessions/{session['session_id']}", headers=headers)


async def ack(proxy: Proxy, session: dict[str, Any], step: int | None) -> None:
    id = session["session_id"]
    body = {"owner": "trainer", "trained": [id], "step": step}
    assert (await proxy.http.post("/rl/v1/ack", json=body)).status_code == 200


async def test_content_is_gone_from_the_disk(proxy: Proxy, start: Start) -> None:
    session = await finalized(proxy)
    assert found_on_disk(proxy)
    response = await delete(proxy, session)
    assert response.status_code == 200, response.text
    info = response.json()
    assert (info["state"], info["reason"], info["content"]) == ("rejected", "deleted", "deleted")
    assert (info["interactions"], info["rewards"], info["final_reward"]) == (0, {}, 1)
    assert found_on_disk(proxy) == []
    assert await proxy.lease() == []
    again = await start()
    shown = (await again.http.get(f"/rl/v1/sessions/{session['session_id']}")).json()
    assert (shown["state"], shown["content"], shown["interactions"]) == ("rejected", "deleted", 0)
    assert found_on_disk(again) == []
    refusal(await again.call(session["api_key"]), 410, "session_closed", "deleted")


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_every_state_that_may_be_deleted(proxy: Proxy, mode: str) -> None:
    opened = await begun(proxy, mode=mode)
    waiting = await begun(proxy, mode=mode)
    await proxy.post("/rl/v1/finalize", {"await_reward": True}, waiting["api_key"])
    over = await finalized(proxy, mode=mode)
    aborted = await begun(proxy, mode=mode)
    await proxy.post(f"/rl/v1/sessions/{aborted['session_id']}/abort", {"reason": "x"})
    expected = {
        "aborted": [opened, waiting, aborted],
        "rejected" if mode == "train" else "evaluated": [over],
    }
    for state, sessions in expected.items():
        for session in sessions:
            info = (await delete(proxy, session)).json()
            assert (info["state"], info["content"]) == (state, "deleted")
    # What had ended keeps its reason.
    shown = (await proxy.http.get(f"/rl/v1/sessions/{aborted['session_id']}")).json()
    assert shown["reason"] == "x"
    assert found_on_disk(proxy) == []
    assert (await proxy.capacity())["buffered"] == 0


async def test_twice_does_no_harm(proxy: Proxy) -> None:
    session = await finalized(proxy)
    first, second = await asyncio.gather(delete(proxy, session), delete(proxy, session))
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.json() == second.json() == (await delete(proxy, session)).json()


async def test_an_idempotency_key_keeps_its_answer(proxy: Proxy) -> None:
    session = await finalized(proxy)
    key = {"idempotency-key": "erase-1"}
    first, second = await delete(proxy, session, **key), await delete(proxy, session, **key)
    assert first.content == second.content
    assert second.headers["idempotent-replayed"] == "true"


async def test_a_call_under_way_leaves_nothing(proxy: Proxy, engine: ScriptedEngine) -> None:
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


async def test_what_training_needs_is_kept(proxy: Proxy) -> None:
    session = await finalized(proxy)
    assert len(await proxy.lease()) == 1
    refusal(await delete(proxy, session), 409, "in_training", "handed to training")
    await ack(proxy, session, step=3)
    # The oldest kept checkpoint is of step 2: a resume from it trains on step 3 again.
    await proxy.client.set_run("training", step=3, checkpoint=None, oldest_step=2)
    error = refusal(await delete(proxy, session), 409, "in_training", "resume")
    assert error["state"] == "trained"
    assert found_on_disk(proxy)
    await proxy.client.set_run("training", step=4, checkpoint=None, oldest_step=3)
    info = (await delete(proxy, session)).json()
    assert (info["state"], info["step"], info["content"]) == ("trained", 3, "deleted")
    assert found_on_disk(proxy) == []


async def test_what_a_killed_trainer_had_is_kept(proxy: Proxy, start: Start) -> None:
    """The step that it was at may be made again; when training has ended, none will be."""
    session, other = await finalized(proxy), await finalized(proxy)
    assert len(await proxy.lease(owner="killed")) == 1
    assert len(await proxy.lease(owner="killed")) == 1
    await proxy.admit(1000, owner="next")
    for again in (proxy, await start()):
        refusal(await delete(again, session), 409, "in_training", "a trainer has had it")
        veto = await again.post(f"/rl/v1/sessions/{session['session_id']}/veto", {})
        refusal(veto, 409, "in_training", "a trainer has had it")
    await again.client.set_run("finished", step=1, checkpoint=None)
    assert (await delete(again, session)).json()["reason"] == "deleted"
    veto = await again.post(f"/rl/v1/sessions/{other['session_id']}/veto", {})
    assert veto.json()["state"] == "rejected"


async def test_what_a_step_of_unknown_number_used_is_kept(proxy: Proxy) -> None:
    session = await finalized(proxy)
    await proxy.lease()
    await ack(proxy, session, step=None)
    await proxy.client.set_run("training", step=9, checkpoint=None, oldest_step=9)
    refusal(await delete(proxy, session), 409, "in_training", "resume")


async def test_what_is_deleted_is_not_replayed(proxy: Proxy) -> None:
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
        refusal(later, 409, "not_replayable", "deleted")


async def test_a_deletion_that_cannot_be_written(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await finalized(proxy)
    commit = proxy.service.journal.commit

    async def full(*statements: Statement) -> None:
        if any(isinstance(statement, EraseContent) for statement in statements):
            raise StoreUnavailable("no space left", retry_after=1)
        await commit(*statements)

    with monkeypatch.context() as patched:
        patched.setattr(proxy.service.journal, "commit", full)
        assert (await delete(proxy, session)).status_code == 503
    (trajectory,) = await proxy.lease()
    assert len(trajectory.interactions) == 1


async def test_a_veto_keeps_the_record(proxy: Proxy, start: Start) -> None:
    session = await finalized(proxy)
    id, key = session["session_id"], session["api_key"]
    path = f"/rl/v1/sessions/{id}/veto"
    info = (await proxy.post(path, {"reason": "the tool lied"}, key)).json()
    assert (info["state"], info["reason"]) == ("rejected", "vetoed: the tool lied")
    assert (info["interactions"], info["content"]) == (1, "stored")
    assert await proxy.lease() == []
    assert (await proxy.capacity())["buffered"] == 0
    refusal(await proxy.post(path, {}, key), 410, "session_closed", "nothing to veto")
    again = await start()
    shown = (await again.http.get(f"/rl/v1/sessions/{id}")).json()
    assert (shown["state"], shown["reason"]) == ("rejected", "vetoed: the tool lied")
    assert await again.lease() == []


async def test_a_vetoed_member_leaves_its_group(proxy: Proxy) -> None:
    sessions = [await finalized(proxy, group_id="g", group_size=3) for _ in range(2)]
    last = await begun(proxy, group_id="g", group_size=3)
    await proxy.post(f"/rl/v1/sessions/{sessions[0]['session_id']}/veto", {})
    await proxy.post("/rl/v1/finalize", {"final_reward": 0}, last["api_key"])
    leased = {t.session_id for t in await proxy.lease(wait=5)}
    assert leased == {sessions[1]["session_id"], last["session_id"]}


async def test_another_sessions_key_deletes_nothing(start: Start) -> None:
    proxy = await start("server.admin_key=operator-secret")
    await proxy.admit(10)
    session, other = await finalized(proxy), await begun(proxy)
    bearer = {"authorization": f"Bearer {other['api_key']}"}
    assert (await delete(proxy, session, **bearer)).status_code in (400, 404)
    assert found_on_disk(proxy)


async def test_what_was_exported_can_be_deleted(proxy: Proxy) -> None:
    """Whoever exported it trains elsewhere: no resume of this run asks for it."""
    session = await finalized(proxy)
    await proxy.export(session["session_id"])
    body = {"owner": "export", "trained": [session["session_id"]]}
    assert (await proxy.http.post("/rl/v1/ack", json=body)).status_code == 200
    assert (await delete(proxy, session)).json()["state"] == "trained"
    assert not found_on_disk(proxy)
