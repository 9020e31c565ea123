"""Leases: closed groups only, long polls, redelivery, acks; and the weight update's routes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from any_agent.errors import Conflict, NotFound
from any_agent.protocol.rl import MAX_NAMED
from any_agent.protocol.training import Rejection
from any_agent.record import unpack_trajectories
from proxy_ext import leases
from proxy_ext.journal import Statement
from proxy_ext.leases import _CONFIRM_TIMEOUT
from tests.support.errors import fails_with
from tests.support.proxy import HELLO, Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine


async def state(proxy: Proxy, session_id: str) -> str:
    return str((await proxy.http.get(f"/rl/v1/sessions/{session_id}")).json()["state"])


async def test_only_closed_groups_are_handed_out(proxy: Proxy) -> None:
    first = await proxy.finished_session(group_id="g", group_size=2, reward=0.5)
    assert await proxy.lease() == []
    second = await proxy.open(group_id="g", group_size=2)
    assert await proxy.lease() == []
    await proxy.complete(second["api_key"])
    await proxy.post("/rl/v1/finalize", {"final_reward": 2}, second["api_key"])
    group = await proxy.lease()
    assert [t.session_id for t in group] == [first["session_id"], second["session_id"]]
    assert [t.final_reward for t in group] == [0.5, 2.0]
    assert {t.group_id for t in group} == {"g"}
    assert await proxy.lease() == []


async def test_a_lease_carries_everything(proxy: Proxy, engine: ScriptedEngine) -> None:
    session = await proxy.open(task_id="t", group_size=1, metadata={"k": [1, {"a": None}]})
    answer = await proxy.complete(session["api_key"])
    body = {"reward": 0.25, "completion_id": answer["id"]}
    await proxy.post("/rl/v1/set_reward", body, session["api_key"])
    await proxy.post("/rl/v1/finalize", {}, session["api_key"])
    (trajectory,) = await proxy.lease()
    assert (trajectory.task_id, trajectory.metadata) == ("t", {"k": [1, {"a": None}]})
    assert trajectory.final_reward is None
    (interaction,) = trajectory.interactions
    (recorded,) = await proxy.recorded(session["session_id"])
    assert interaction.reward == recorded.reward == 0.25
    assert interaction.output_ids.tolist() == recorded.output_ids.tolist()
    assert interaction.prompt_delta_ids.tolist() == engine.requests[0]["input_ids"]


async def test_a_lease_has_max_groups_groups(proxy: Proxy) -> None:
    for k in range(3):
        await proxy.finished_session(task_id=f"t{k}", group_size=1)
    body = {"owner": "t", "wait": 0, "max_groups": 2}
    response = await proxy.http.post("/rl/v1/lease", json=body)
    assert response.headers["content-type"] == "application/x-msgpack"
    assert [t.task_id for t in unpack_trajectories(response.content)] == ["t0", "t1"]
    assert [t.task_id for t in await proxy.lease()] == ["t2"]
    response = await proxy.http.post("/rl/v1/lease", json=body)
    assert (response.status_code, response.content) == (204, b"")


async def test_a_long_poll_wakes_at_once(proxy: Proxy) -> None:
    polls = [asyncio.create_task(proxy.lease(wait=60)) for _ in range(2)]
    session = await proxy.open()
    await proxy.complete(session["api_key"])
    async with asyncio.timeout(60):
        await proxy.post("/rl/v1/finalize", {"final_reward": 1}, session["api_key"])
        done, (other,) = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
        assert [len(p.result()) for p in done] == [1]
        await proxy.finished_session()
        assert len(await other) == 1


async def test_a_poll_whose_client_left_takes_nothing(proxy: Proxy) -> None:
    async with httpx.AsyncClient(base_url=proxy.url) as gone:
        body = {"owner": "gone", "wait": 60}
        poll = asyncio.create_task(gone.post("/rl/v1/lease", json=body))
        waiters: Any = proxy.service.sessions.ready._waiters  # type: ignore[attr-defined]
        await until(lambda: len(waiters) == 1)
        poll.cancel()
        await until(lambda: len(waiters) == 0, "the poll of a client that left goes on")
    session = await proxy.finished_session()
    (trajectory,) = await proxy.lease(owner="here")
    assert trajectory.session_id == session["session_id"]


async def test_a_silent_holders_lease_runs_out(start: Start) -> None:
    proxy = await start("rollout.lease_ttl=0.2")
    await proxy.admit(5)
    session = await proxy.finished_session()
    assert len(await proxy.lease()) == 1
    (again,) = await proxy.lease(wait=60)
    assert again.session_id == session["session_id"]
    assert len(again.interactions) == 1


async def test_a_sweep_does_not_end_a_lease_that_begins(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await proxy.finished_session()
    changed = proxy.service.sessions._update_indexes
    sweeps: list[asyncio.Task[None]] = []

    async def swept(sessions: Any) -> None:
        await changed(sessions)
        sweeps.append(asyncio.create_task(proxy.service.leases.expire()))
        await asyncio.sleep(0)

    with monkeypatch.context() as patched:
        patched.setattr(proxy.service.sessions, "_update_indexes", swept)
        assert len(await proxy.lease()) == 1
        await asyncio.gather(*sweeps)
    assert await state(proxy, session["session_id"]) == "leased"


async def test_held_leases_are_renewed(start: Start) -> None:
    proxy = await start("rollout.lease_ttl=100")
    await proxy.admit(5)
    held, lost = [(await proxy.finished_session())["session_id"] for _ in range(2)]
    for _ in range(2):
        await proxy.lease()
    sessions = proxy.service.sessions.live
    before = {id: sessions[id].lease_expires for id in (held, lost)}
    await proxy.admit(5, held=[held, "unknown"])
    assert sessions[held].lease_expires > before[held]
    # A lease whose answer was lost is not among those held: it runs out.
    assert sessions[lost].lease_expires == before[lost]


async def test_a_new_trainer_takes_back_what_the_last_one_had(proxy: Proxy) -> None:
    session = await proxy.finished_session()
    exported = await proxy.finished_session()
    await proxy.export(exported["session_id"])
    await proxy.lease(owner="old")
    assert await proxy.lease(owner="new") == []
    await proxy.admit(10, owner="new")
    (trajectory,) = await proxy.lease(owner="new")
    assert trajectory.session_id == session["session_id"]
    with fails_with(Conflict, "old"):
        await proxy.client.ack(owner="old", trained=[session["session_id"]], rejected=[])
    assert await state(proxy, exported["session_id"]) == "leased"
    assert await proxy.client.ack(owner="new", trained=[session["session_id"]], rejected=[]) == 1


async def test_a_lease_whose_answer_was_lost_is_handed_out_again(proxy: Proxy) -> None:
    lost, fresh = [(await proxy.finished_session())["session_id"] for _ in range(2)]
    for _ in range(2):
        await proxy.lease()
    live = proxy.service.sessions.live
    # Long enough ago for its holder to have said that it has it.
    live[lost].lease_began -= _CONFIRM_TIMEOUT + 1
    await proxy.admit(9, number=1)
    assert [await state(proxy, id) for id in (lost, fresh)] == ["finalized", "leased"]
    (again,) = await proxy.lease()
    assert again.session_id == lost


async def test_a_restart_takes_no_lease_back_at_once(start: Start, proxy: Proxy) -> None:
    """What its holder says that it has may be from before the answer arrived."""
    id = (await proxy.finished_session())["session_id"]
    await proxy.lease()
    again = await start()
    await again.admit(9, held=[])
    assert await state(again, id) == "leased"
    again.service.sessions.live[id].lease_began -= _CONFIRM_TIMEOUT + 1
    await again.admit(9, held=[], number=1)
    assert await state(again, id) == "finalized"


async def test_an_answer_has_a_bound(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(3):
        for _ in range(2):
            await proxy.finished_session(group_id=f"g{k}", group_size=2)
    one = proxy.service.sessions.lease_index.first(1)[0]
    size = sum(leases._bytes(i) for session in one for i in session.tree)
    body = {"owner": "trainer", "wait": 0, "max_groups": 9}

    async def groups() -> list[str]:
        packed = (await proxy.http.post("/rl/v1/lease", json=body)).content
        return [t.group_id for t in unpack_trajectories(packed)]

    # A group is never divided; one alone may be too large.
    monkeypatch.setattr(leases, "_ANSWER_BYTES", 1)
    assert await groups() == ["g0", "g0"]
    monkeypatch.setattr(leases, "_ANSWER_BYTES", 2 * size + 1)
    assert await groups() == ["g1", "g1", "g2", "g2"]


async def test_messages_are_bounded(proxy: Proxy) -> None:
    ids = ["x"] * (MAX_NAMED + 1)
    for method, path, body in (
        ("PUT", "capacity", {"limit": 1, "ttl": 1, "owner": "t", "held": ids}),
        ("POST", "ack", {"owner": "t", "trained": ids}),
        ("POST", "lease", {"owner": "t", "wait": 0, "session_ids": ids[:1025]}),
    ):
        response = await proxy.http.request(method, f"/rl/v1/{path}", json=body)
        assert response.status_code == 400, response.text


async def test_an_ack_says_which_step_it_was(proxy: Proxy) -> None:
    one, two, three = [(await proxy.finished_session())["session_id"] for _ in range(3)]
    for _ in range(3):
        await proxy.lease()
    client = proxy.client
    stale = Rejection(session_id=two, reason="stale")
    await client.ack(owner="trainer", trained=[one], rejected=[stale], step=7)
    await client.ack(owner="trainer", trained=[three], rejected=[])
    rows = [await proxy.service.journal.session(id) for id in (one, two, three)]
    assert [row.step for row in rows if row] == [7, 7, None]
    assert all(row is not None and row.ended_at is not None for row in rows)
    # The first word is the last one.
    await client.ack(owner="trainer", trained=[one], rejected=[], step=9)
    again = await proxy.service.journal.session(one)
    assert again is not None and again.step == 7
    await client.set_run("training", step=8, checkpoint="/c/8", oldest_step=5)
    assert proxy.service.run.oldest_step == 5


async def test_a_slow_message_does_not_undo_a_later_one(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = (await proxy.finished_session())["session_id"]
    await proxy.lease()
    # As if its answer had been lost a while ago: the first message has it taken back.
    proxy.service.sessions.live[id].lease_began = -1000.0
    commit, written = proxy.service.journal.commit, asyncio.Event()

    async def slow(*statements: Statement) -> None:
        await written.wait()
        await commit(*statements)

    monkeypatch.setattr(proxy.service.journal, "commit", slow)
    first = asyncio.create_task(proxy.admit(9, number=1))
    await until(lambda: proxy.service.leases._last_message == ("trainer", 1))
    assert (await proxy.admit(3, number=2, held=[id]))["limit"] == 3
    written.set()
    await first
    assert (await proxy.capacity())["limit"] == 3


async def test_an_ack_ends_sessions_once(proxy: Proxy) -> None:
    one, two, three = [(await proxy.finished_session())["session_id"] for _ in range(3)]
    for _ in range(3):
        await proxy.lease()
    rejected = [Rejection(session_id=two, reason="zero_variance")]
    for expected in (2, 0):  # once more changes nothing
        acked = await proxy.client.ack(owner="trainer", trained=[one], rejected=rejected)
        assert acked == expected
    assert await state(proxy, one) == "trained"
    info = (await proxy.http.get(f"/rl/v1/sessions/{two}")).json()
    assert (info["state"], info["reason"]) == ("rejected", "zero_variance")
    assert (await proxy.capacity())["buffered"] == 1
    with fails_with(Conflict, "trained"):
        await proxy.client.ack(
            owner="trainer", trained=[], rejected=[Rejection(session_id=one, reason="x")]
        )
    with pytest.raises(NotFound):
        await proxy.client.ack(owner="trainer", trained=["ses-0-x"], rejected=[])
    # All or nothing: a conflict leaves the others as they were.
    with pytest.raises(Conflict):
        await proxy.client.ack(
            owner="trainer", trained=[three], rejected=[Rejection(session_id=one, reason="x")]
        )
    assert await state(proxy, three) == "leased"


async def test_a_trained_session_is_sealed(proxy: Proxy) -> None:
    session = await proxy.finished_session()
    await proxy.lease()
    await proxy.client.ack(owner="trainer", trained=[session["session_id"]], rejected=[])
    response = await proxy.call(session["api_key"])
    assert response.status_code == 410
    assert response.json()["error"]["state"] == "trained"
    info = (await proxy.http.get(f"/rl/v1/sessions/{session['session_id']}")).json()
    assert info["interactions"] == 1


async def test_export_leases_what_it_exports(proxy: Proxy) -> None:
    session = await proxy.open()
    id = session["session_id"]
    response = await proxy.http.post("/rl/v1/export_trajectories", json={"session_ids": [id]})
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "not_finalized"
    await proxy.complete(session["api_key"])
    await proxy.post("/rl/v1/finalize", {"final_reward": 3}, session["api_key"])
    for _ in range(2):  # asking again gives it again
        ((row,),) = [rows.values() for rows in (await proxy.export(id)).values()]
        assert row["rewards"] == 3
        assert row["versions"].count(-1) == row["loss_mask"].count(0)
    assert await proxy.lease() == []
    assert await proxy.client.ack(owner="export", trained=[id], rejected=[]) == 1
    response = await proxy.http.post("/rl/v1/export_trajectories", json={"session_ids": ["x"]})
    assert response.status_code == 404


async def test_a_group_is_not_handed_out_in_part(proxy: Proxy) -> None:
    first, second = [
        (await proxy.finished_session(group_id="g", group_size=2))["session_id"] for _ in range(2)
    ]
    await proxy.export(first)
    assert await proxy.lease() == []
    # As when the export's lease runs out.
    await proxy.service.leases.give_back([first], "export")
    assert [t.session_id for t in await proxy.lease()] == [first, second]


async def test_an_export_that_is_refused_leases_nothing(proxy: Proxy) -> None:
    session = await proxy.open()
    id, key = session["session_id"], session["api_key"]
    answer = await proxy.complete(key)
    # Nothing follows the recorded answer: rendered anew, which is no part of a single row.
    await proxy.complete(key, [*HELLO, answer["choices"][0]["message"]])
    await proxy.post("/rl/v1/finalize", {"final_reward": 1}, key)
    other = (await proxy.finished_session())["session_id"]
    await proxy.export(other)
    body = {"session_ids": [id, other], "style": "concat"}
    response = await proxy.http.post("/rl/v1/export_trajectories", json=body)
    assert response.status_code == 422, response.text
    # An earlier export's lease is not touched by it.
    assert [await state(proxy, s) for s in (id, other)] == ["finalized", "leased"]
    assert [t.session_id for t in await proxy.lease()] == [id]


async def test_an_export_discounts_later_rewards(proxy: Proxy) -> None:
    session = await proxy.open()
    key = session["api_key"]
    first = await proxy.complete(key, max_tokens=5)
    await proxy.post("/rl/v1/set_reward", {"reward": 1}, key)
    await proxy.post("/rl/v1/finalize", {"final_reward": 2}, key)
    rows = (await proxy.export(session["session_id"], discount=0.5))[session["session_id"]]
    assert rows[first["id"]]["rewards"] == 3


# -- weight updates ----------------------------------------------------------------------------


async def test_a_weight_update_goes_on_amid_a_call(proxy: Proxy, engine: ScriptedEngine) -> None:
    session = await proxy.open()
    engine.hold(3)
    call = asyncio.create_task(proxy.complete(session["api_key"]))
    await until(lambda: any(len(r.ids) == 3 for r in engine.running.values()))
    await proxy.client.pause(ttl=60)
    assert engine.pauses[-1] == "abort"
    late = asyncio.create_task(proxy.complete(session["api_key"], max_tokens=2))
    engine.weight_version = "5"
    await proxy.client.publish_version(version=5, path="/weights/5", step=1)
    await proxy.client.resume()
    await asyncio.gather(call, late)
    recorded = {len(i.output_ids): i for i in await proxy.recorded(session["session_id"])}
    assert recorded[8].output_versions.tolist() == [0, 0, 0, 5, 5, 5, 5, 5]
    assert recorded[2].output_versions.tolist() == [5, 5]
    first, resumed = [r for r in engine.requests if r["sampling_params"]["max_new_tokens"] > 2]
    assert resumed["input_ids"] == first["input_ids"] + recorded[8].output_ids[:3].tolist()
    assert resumed["sampling_params"]["max_new_tokens"] == 5
    assert (await proxy.http.get("/rl/v1/version")).json() == {"version": 5, "step": 1}
    assert (await proxy.open())["version"] == 5
    with fails_with(Conflict, "versions"):
        await proxy.client.publish_version(version=4, path="x", step=2)


async def test_a_pause_ends_by_itself(start: Start, engine: ScriptedEngine) -> None:
    """The trainer died in the middle of an update."""
    proxy = await start()
    session = await proxy.open(mode="eval")
    await proxy.client.pause(ttl=0.1)
    engine.weight_version = "3"
    async with asyncio.timeout(60):
        response = await proxy.call(session["api_key"])
    assert response.status_code == 200
    assert response.headers["x-any-agent-version"] == "3"
    assert (await proxy.http.get("/rl/v1/run")).json()["version"] == 3


async def test_an_update_that_takes_too_long(start: Start, engine: ScriptedEngine) -> None:
    proxy = await start("engine.update_wait=0.1")
    session = await proxy.open(mode="eval")
    await proxy.client.pause(ttl=60)
    for stream in (False, True):
        response = await proxy.call(session["api_key"], stream=stream)
        assert response.status_code == 503
        assert "weight update" in response.json()["error"]["message"]
        assert response.headers["retry-after"]
    await proxy.client.resume()
    await proxy.complete(session["api_key"])


async def test_a_veto_that_comes_while_a_group_is_read_ends_no_poll(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer would end with it."""
    first, second = [(await proxy.finished_session())["session_id"] for _ in range(2)]
    fit = proxy.service.leases._fitting
    reached: list[int] = []

    async def vetoed(groups: Any) -> Any:
        reached.append(len(groups))
        if len(reached) == 1:
            response = await proxy.post(f"/rl/v1/sessions/{first}/veto", {"reason": "odd"})
            assert response.status_code == 200, response.text
        return await fit(groups)

    monkeypatch.setattr(proxy.service.leases, "_fitting", vetoed)
    (trajectory,) = await proxy.lease()
    assert trajectory.session_id == second
    assert len(reached) == 2
    assert [await state(proxy, id) for id in (first, second)] == ["rejected", "leased"]


async def test_what_is_given_back_together_keeps_its_own_holders(proxy: Proxy) -> None:
    """Also on disk: whether a trainer has had it decides on what may still change."""
    had = (await proxy.finished_session())["session_id"]
    await proxy.lease()
    exported = (await proxy.finished_session())["session_id"]
    await proxy.export(exported)
    for held in proxy.service.sessions.lease_index.leased:
        held.lease_expires = 0.0
    await proxy.service.leases.expire()
    for session_id, owner in ((had, "trainer"), (exported, None)):
        row = await proxy.service.journal.session(session_id)
        assert row is not None
        assert (row.state, row.owner) == ("finalized", owner)


async def test_an_export_leaves_alone_what_a_trainer_has_had(proxy: Proxy) -> None:
    """It may be in a step that was killed, and will be asked for as it was."""
    session_id = (await proxy.finished_session())["session_id"]
    await proxy.lease()
    await proxy.service.leases.give_back([session_id], "trainer")
    body = {"session_ids": [session_id]}
    response = await proxy.http.post("/rl/v1/export_trajectories", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "in_training")
    run = {"state": "finished", "step": 1, "checkpoint": None, "oldest_step": None}
    assert (await proxy.http.put("/rl/v1/run", json=run)).status_code == 200
    assert list(await proxy.export(session_id)) == [session_id]


async def test_an_ack_says_one_thing_of_a_session(proxy: Proxy) -> None:
    session_id = (await proxy.finished_session())["session_id"]
    await proxy.lease()
    rejected = [{"session_id": session_id, "reason": "stale"}]
    body = {"owner": "trainer", "trained": [session_id], "rejected": rejected}
    response = await proxy.http.post("/rl/v1/ack", json=body)
    assert response.status_code == 400, response.text
    assert await state(proxy, session_id) == "leased"
