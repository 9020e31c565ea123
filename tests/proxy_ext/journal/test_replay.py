"""A resume leases again what steps after its checkpoint had taken: the one way out of `trained`."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from any_agent.errors import Conflict, InvalidRequest, NotFound, StoreUnavailable
from any_agent.protocol.training import Rejection
from any_agent.record import unpack_trajectories
from any_agent.types import Trajectory
from proxy_ext.journal import SessionRow, Statement
from tests.proxy_ext.calls.test_faults import SlowJournal
from tests.proxy_ext.leases.test_leases import state
from tests.support.errors import fails_with
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start


async def group_of(proxy: Proxy, name: str, size: int = 2) -> list[str]:
    return [
        (await proxy.finished_session(k + 0.5, group_id=name, group_size=size))["session_id"]
        for k in range(size)
    ]


async def replay(proxy: Proxy, *ids: str, owner: str = "next") -> list[Trajectory]:
    return unpack_trajectories(await proxy.client.replay(owner=owner, session_ids=list(ids)))


def plain(trajectory: Trajectory) -> dict[str, Any]:
    """What the trainer computes with."""
    return {
        "id": trajectory.session_id,
        "group": trajectory.group_id,
        "reward": trajectory.final_reward,
        "interactions": [
            (i.id, i.parent_id, i.output_ids.tolist(), i.output_logprobs.tolist(), i.reward)
            for i in trajectory.interactions
        ],
    }


async def test_a_step_is_taken_again_as_it_was_and_again_after_a_restart(
    start: Start, proxy: Proxy
) -> None:
    one, two = await group_of(proxy, "g")
    before = await proxy.lease(owner="first")
    stale = Rejection(session_id=two, reason="stale")
    await proxy.client.ack(owner="first", trained=[one], rejected=[stale])
    assert one not in proxy.service.sessions.live
    again = await replay(proxy, two, one)
    # In the order of asking, with everything that they had.
    assert [plain(t) for t in again] == [plain(t) for t in reversed(before)]
    assert [await state(proxy, id) for id in (one, two)] == ["leased", "leased"]
    now = await proxy.admit(10, owner="next", held=[one, two])
    assert (now["buffered"], now["admitted"]) == (2, 2)
    again = await replay(proxy, one, two)  # once more is the same
    await proxy.service.journal.close()
    proxy = await start()
    assert [await state(proxy, id) for id in (one, two)] == ["leased", "leased"]
    assert [plain(t) for t in await replay(proxy, one, two)] == [plain(t) for t in again]
    await proxy.client.ack(owner="next", trained=[one], rejected=[stale])
    assert [await state(proxy, id) for id in (one, two)] == ["trained", "rejected"]
    assert (await proxy.capacity())["buffered"] == 0
    assert one not in proxy.service.sessions.live


async def test_a_replay_takes_over_what_another_trainer_had(proxy: Proxy) -> None:
    waiting = (await proxy.finished_session())["session_id"]
    assert [t.session_id for t in await replay(proxy, waiting, owner="first")] == [waiting]
    assert [t.session_id for t in await replay(proxy, waiting)] == [waiting]
    with fails_with(Conflict, "first"):
        await proxy.client.ack(owner="first", trained=[waiting], rejected=[])
    assert await proxy.client.ack(owner="next", trained=[waiting], rejected=[]) == 1


async def test_a_replay_of_what_was_never_trained_on_is_refused_by_name(proxy: Proxy) -> None:
    trained = (await proxy.finished_session())["session_id"]
    await proxy.lease()
    await proxy.client.ack(owner="trainer", trained=[trained], rejected=[])
    running = (await proxy.open())["session_id"]
    exported = (await proxy.finished_session())["session_id"]
    await proxy.export(exported)
    aborted = (await proxy.open())["session_id"]
    await proxy.post(f"/rl/v1/sessions/{aborted}/abort", {})
    with fails_with(Conflict, code="not_replayable") as raised:
        await replay(proxy, trained, running, exported, aborted)
    for named in (f"{running} is open", f"{exported} is leased", f"{aborted} is aborted"):
        assert named in raised.value.message
    # All or none; and only a replay leads out of `trained`.
    for path, more in (("lease", {"owner": "trainer"}), ("export_trajectories", {})):
        body = {"session_ids": [trained], **more}
        assert (await proxy.http.post(f"/rl/v1/{path}", json=body)).status_code == 409
    assert await state(proxy, trained) == "trained"
    with fails_with(NotFound, code="session_not_found"):
        await replay(proxy, "ses-0-0000000000000000")
    # By this a resume knows that the rank has lost what it held.
    with fails_with(InvalidRequest, "session_ids"):
        await proxy.client.request("POST", "/lease", {"owner": "next", "replay": True})


async def test_a_later_generation_of_the_task_stays_the_one_that_is_joined(proxy: Proxy) -> None:
    async def member() -> dict[str, Any]:
        return await proxy.open(task_id="t", group_size=2)

    first = [await proxy.finished_session(task_id="t", group_size=2) for _ in range(2)]
    ids = [session["session_id"] for session in first]
    await proxy.lease()
    await proxy.client.ack(owner="trainer", trained=ids, rejected=[])
    current = await member()
    await replay(proxy, *ids)
    assert (await member())["group_id"] == current["group_id"] != first[0]["group_id"]


async def test_a_resume_that_leaves_in_the_middle_loses_nothing(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await group_of(proxy, "g")
    await proxy.lease()
    await proxy.client.ack(owner="trainer", trained=[one, two], rejected=[])
    slow = SlowJournal(proxy, monkeypatch)
    async with httpx.AsyncClient(base_url=proxy.url) as gone:
        body = {"owner": "gone", "session_ids": [one, two], "replay": True}
        call = asyncio.create_task(gone.post("/rl/v1/lease", json=body))
        await until(lambda: slow.waiting)
        call.cancel()
        await asyncio.wait([call])
    slow.go.set()
    session = await until(lambda: proxy.service.sessions.live.get(one))
    await until(lambda: session.state == "finalized")
    assert [t.session_id for t in await replay(proxy, one, two)] == [one, two]


async def test_a_new_trainers_lease_is_not_taken_back_as_the_last_ones(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first message comes while it leases what the last one had."""
    id = (await proxy.finished_session())["session_id"]
    await proxy.lease(owner="last")
    commit = proxy.service.journal.commit
    message: list[asyncio.Task[dict[str, Any]]] = []

    async def slow(*statements: Statement) -> None:
        if not message:
            message.append(asyncio.create_task(proxy.admit(10, owner="next", held=[id])))
            await until(lambda: proxy.service.sessions.admission.limit == 10)
        await commit(*statements)

    monkeypatch.setattr(proxy.service.journal, "commit", slow)
    assert len(await replay(proxy, id)) == 1
    await message[0]
    assert await state(proxy, id) == "leased"
    assert await proxy.client.ack(owner="next", trained=[id], rejected=[]) == 1


async def test_a_replay_that_the_store_interrupts_is_made_again_whole(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await group_of(proxy, "g")
    before = await proxy.lease(owner="first")
    await proxy.client.ack(owner="first", trained=ids, rejected=[])
    group = proxy.service.journal.group
    failures = [StoreUnavailable("too many reads wait")]

    async def failing(group_id: str) -> list[SessionRow]:
        if failures:
            raise failures.pop()
        return await group(group_id)

    monkeypatch.setattr(proxy.service.journal, "group", failing)
    body = {"owner": "next", "session_ids": ids, "replay": True}
    assert (await proxy.http.post("/rl/v1/lease", json=body)).status_code == 503
    assert [await state(proxy, id) for id in ids] == ["trained"] * 2, "nothing has changed"
    failures.append(StoreUnavailable("too many reads wait"))
    # The client asks again by itself.
    assert [plain(t) for t in await replay(proxy, *ids)] == [plain(t) for t in before]
    assert not failures
    # And if that trainer dies, the group is handed out whole.
    await proxy.admit(10, owner="another")
    assert [plain(t) for t in await proxy.lease(owner="another")] == [plain(t) for t in before]
