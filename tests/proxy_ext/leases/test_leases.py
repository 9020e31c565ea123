"""Leases: closed groups only, long polls, redelivery, acks; and the weight update's routes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from any_agent.errors import Conflict, NotFound
from any_agent.protocol.rl import MAX_NAMED
from any_agent.protocol.training import Rejection
from any_agent.record import unpack_trajectories
from any_agent.types import SessionState
from proxy_ext import leases
from proxy_ext.sessions import indexes as module
from proxy_ext.sessions.groups import GroupBook
from proxy_ext.sessions.ids import SessionIds
from proxy_ext.sessions.indexes import LeaseIndex
from proxy_ext.sessions.session import RecordedSession
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.errors import fails_with
from tests.support.journal import make_row
from tests.support.proxy import HELLO, LIMIT, Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import count_polls, finalize, hold_commits, info


async def state(proxy: Proxy, session_id: str) -> str:
    return str((await info(proxy, session_id))["state"])


async def some(proxy: Proxy, number: int, **fields: Any) -> list[str]:
    """Ids of sessions that are finalized."""
    return [(await proxy.finished_session(**fields))["session_id"] for _ in range(number)]


async def test_a_lease_has_at_most_max_groups_groups_and_a_bounded_size(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(5):
        await some(proxy, 2, group_id=f"g{k}", group_size=2)

    async def groups() -> list[str]:
        body = {"owner": "trainer", "wait": 0, "max_groups": 2}
        response = await proxy.http.post("/rl/v1/lease", json=body)
        assert response.headers["content-type"] == "application/x-msgpack"
        return [t.group_id for t in unpack_trajectories(response.content)]

    assert await groups() == ["g0", "g0", "g1", "g1"]
    with monkeypatch.context() as patch:
        # A group is never divided; one alone may be too large.
        patch.setattr(leases, "ANSWER_BYTES", 1)
        assert await groups() == ["g2", "g2"]
    assert await groups() == ["g3", "g3", "g4", "g4"]
    response = await proxy.http.post("/rl/v1/lease", json={"owner": "trainer", "wait": 0})
    assert (response.status_code, response.content) == (204, b"")


async def test_a_poll_whose_client_left_takes_nothing(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = count_polls(proxy, monkeypatch)
    async with httpx.AsyncClient(base_url=proxy.url) as gone:
        body = {"owner": "gone", "wait": 60}
        poll = asyncio.create_task(gone.post("/rl/v1/lease", json=body))
        await until(lambda: waiting() == 1)
        poll.cancel()
        await until(lambda: waiting() == 0, "the poll of a client that left goes on")
    session = await proxy.finished_session()
    (trajectory,) = await proxy.lease(owner="here")
    assert trajectory.session_id == session["session_id"]


async def test_a_silent_holders_lease_runs_out(start: Start) -> None:
    proxy = await start("rollout.lease_ttl=0.2", admit=5)
    session = await proxy.finished_session()
    assert len(await proxy.lease()) == 1
    (again,) = await proxy.lease(wait=60)
    assert again.session_id == session["session_id"]
    assert len(again.interactions) == 1


async def test_a_sweep_does_not_end_a_lease_that_begins(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    (id,) = await some(proxy, 1)
    move = proxy.service.sessions.move
    sweeps: list[asyncio.Task[None]] = []

    async def swept(*arguments: Any, **fields: Any) -> None:
        await move(*arguments, **fields)
        sweeps.append(asyncio.create_task(proxy.service.leases.expire()))
        await asyncio.sleep(0)

    with monkeypatch.context() as patched:
        patched.setattr(proxy.service.sessions, "move", swept)
        assert len(await proxy.lease()) == 1
        await asyncio.gather(*sweeps)
    assert await state(proxy, id) == "leased"


async def test_held_leases_are_renewed_and_those_of_a_lost_answer_handed_out_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await start("rollout.lease_ttl=100", admit=5)
    held, lost, exported = await some(proxy, 3)
    await proxy.export(exported)
    assert [len(await proxy.lease()) for _ in range(2)] == [1, 1]
    live = proxy.service.sessions.live
    before = {id: live[id].lease_expires for id in (held, lost)}
    await proxy.admit(5, held=[held, "unknown"])
    assert live[held].lease_expires > before[held]
    # Its answer may still be on the way, as what its holder says may be from before it arrived.
    assert (await state(proxy, lost), live[lost].lease_expires) == ("leased", before[lost])
    again = await start("rollout.lease_ttl=100")
    await again.admit(9, held=[held])
    assert await state(again, lost) == "leased"
    monkeypatch.setattr(leases, "CONFIRM_TIMEOUT", 0.0)
    await again.admit(9, held=[held])
    states = [await state(again, id) for id in (lost, held, exported)]
    assert states == ["finalized", "leased", "leased"]
    assert [t.session_id for t in await again.lease()] == [lost]


async def test_a_new_trainer_takes_back_what_the_last_one_had(proxy: Proxy) -> None:
    id, exported = await some(proxy, 2)
    await proxy.export(exported)
    await proxy.lease(owner="old")
    assert await proxy.lease(owner="new") == []
    await proxy.admit(10, owner="new")
    (trajectory,) = await proxy.lease(owner="new")
    assert trajectory.session_id == id
    with fails_with(Conflict, "old"):
        await proxy.client.ack(owner="old", trained=[id], rejected=[])
    assert await state(proxy, exported) == "leased"
    assert await proxy.client.ack(owner="new", trained=[id], rejected=[]) == 1


async def test_messages_that_name_too_many_sessions_are_refused(proxy: Proxy) -> None:
    ids = ["x"] * (MAX_NAMED + 1)
    for method, path, body in (
        ("PUT", "capacity", {"limit": 1, "ttl": 1, "owner": "t", "held": ids}),
        ("POST", "ack", {"owner": "t", "trained": ids}),
        ("POST", "lease", {"owner": "t", "wait": 0, "session_ids": ids[:1025]}),
    ):
        response = await proxy.http.request(method, f"/rl/v1/{path}", json=body)
        assert response.status_code == 400, response.text


async def test_an_ack_ends_sessions_once_and_says_of_which_step(proxy: Proxy) -> None:
    one, two, three, four = await some(proxy, 4)
    for _ in range(4):
        await proxy.lease()
    client = proxy.client
    dull, stale = (Rejection(session_id=two, reason=why) for why in ("zero_variance", "stale"))
    for expected in (2, 0):  # once more changes nothing
        acked = await client.ack(owner="trainer", trained=[one], rejected=[dull], step=7)
        assert acked == expected
    # The first word is the last one.
    await client.ack(owner="trainer", trained=[one], rejected=[stale], step=9)
    await client.ack(owner="trainer", trained=[three], rejected=[])
    rows = [await proxy.service.journal.session(id) for id in (one, two, three)]
    assert [(row.state, row.step, row.reason) for row in rows if row is not None] == [
        ("trained", 7, None),
        ("rejected", 7, "zero_variance"),
        ("trained", None, None),
    ]
    assert all(row is not None and row.ended_at is not None for row in rows)
    assert (await proxy.capacity())["buffered"] == 1
    with pytest.raises(NotFound):
        await client.ack(owner="trainer", trained=["ses-0-x"], rejected=[])
    # All or nothing: a conflict leaves the others as they were.
    with fails_with(Conflict, "trained"):
        rejected = [Rejection(session_id=one, reason="x")]
        await client.ack(owner="trainer", trained=[four], rejected=rejected)
    both = {"trained": [four], "rejected": [{"session_id": four, "reason": "stale"}]}
    response = await proxy.http.post("/rl/v1/ack", json={"owner": "trainer", **both})
    assert response.status_code == 400, response.text
    assert await state(proxy, four) == "leased"
    await client.set_run("training", step=8, checkpoint="/c/8", oldest_step=5)
    assert proxy.service.run.oldest_step == 5


async def test_a_slow_message_does_not_undo_a_later_one(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    (id,) = await some(proxy, 1)
    await proxy.lease()
    # As if its answer had been lost a while ago: the first message has it taken back.
    proxy.service.sessions.live[id].lease_began = -1000.0
    begun, go = hold_commits(proxy.service.journal, monkeypatch)
    first = asyncio.create_task(proxy.admit(9, number=1))
    await asyncio.wait_for(begun.wait(), LIMIT)
    assert (await proxy.admit(3, number=2, held=[id]))["limit"] == 3
    go.set()
    await first
    assert (await proxy.capacity())["limit"] == 3


async def test_export_leases_what_it_exports(proxy: Proxy) -> None:
    session = await proxy.open()
    id, key = session["session_id"], session["api_key"]
    response = await proxy.http.post("/rl/v1/export_trajectories", json={"session_ids": [id]})
    refusal(response, 409, "not_finalized")
    first = await proxy.complete(key, max_tokens=5)
    await proxy.post("/rl/v1/set_reward", {"reward": 1}, key)
    await finalize(proxy, session, final_reward=2)
    for _ in range(2):  # asking again gives it again
        ((row,),) = [rows.values() for rows in (await proxy.export(id, discount=0.5)).values()]
        assert row["rewards"] == 3
        assert row["versions"].count(-1) == row["loss_mask"].count(0)
    assert list((await proxy.export(id))[id]) == [first["id"]]
    assert await proxy.lease() == []
    assert await proxy.client.ack(owner="export", trained=[id], rejected=[]) == 1
    response = await proxy.http.post("/rl/v1/export_trajectories", json={"session_ids": ["x"]})
    assert response.status_code == 404


async def test_an_export_that_is_refused_leases_nothing(proxy: Proxy) -> None:
    session = await proxy.open()
    id, key = session["session_id"], session["api_key"]
    answer = await proxy.complete(key)
    # Nothing follows the recorded answer: rendered anew, which is no part of a single row.
    await proxy.complete(key, [*HELLO, answer["choices"][0]["message"]])
    await finalize(proxy, session, final_reward=1)
    (other,) = await some(proxy, 1)
    await proxy.export(other)
    body = {"session_ids": [id, other], "style": "concat"}
    response = await proxy.http.post("/rl/v1/export_trajectories", json=body)
    assert response.status_code == 422, response.text
    # An earlier export's lease is not touched by it.
    assert [await state(proxy, s) for s in (id, other)] == ["finalized", "leased"]
    assert [t.session_id for t in await proxy.lease()] == [id]


async def test_a_pause_ends_by_itself(proxy: Proxy, engine: ScriptedEngine) -> None:
    """The trainer died in the middle of an update."""
    session = await proxy.open(mode="eval")
    await proxy.client.pause(ttl=0.1)
    engine.weight_version = "3"
    async with asyncio.timeout(60):
        response = await proxy.call(session["api_key"])
    assert response.status_code == 200
    assert response.headers["x-any-agent-version"] == "3"
    assert (await proxy.http.get("/rl/v1/run")).json()["version"] == 3
    # No version comes after a later one.
    await proxy.client.publish_version(version=5, path="/weights/5", step=1)
    assert (await proxy.http.get("/rl/v1/version")).json() == {"version": 5, "step": 1}
    assert (await proxy.open())["version"] == 5
    with fails_with(Conflict, "versions"):
        await proxy.client.publish_version(version=4, path="x", step=2)


async def test_a_veto_that_comes_while_a_group_is_read_ends_no_poll(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer would end with it."""
    first, second = await some(proxy, 2)
    load, vetoed = proxy.service.sessions.load, False

    async def vetoing(session: Any) -> Any:
        nonlocal vetoed
        if not vetoed:
            vetoed = True
            response = await proxy.post(f"/rl/v1/sessions/{first}/veto", {"reason": "odd"})
            assert response.status_code == 200, response.text
        return await load(session)

    monkeypatch.setattr(proxy.service.sessions, "load", vetoing)
    (trajectory,) = await proxy.lease()
    assert trajectory.session_id == second
    assert [await state(proxy, id) for id in (first, second)] == ["rejected", "leased"]


async def test_what_is_given_back_together_keeps_its_own_holders(proxy: Proxy) -> None:
    """Also on disk: whether a trainer has had it decides on what may still change."""
    (had,) = await some(proxy, 1)
    await proxy.lease()
    (exported,) = await some(proxy, 1)
    await proxy.export(exported)
    for held in proxy.service.sessions.lease_index.leased:
        held.lease_expires = 0.0
    await proxy.service.leases.expire()
    for session_id, owner in ((had, "trainer"), (exported, None)):
        row = await proxy.service.journal.session(session_id)
        assert row is not None and (row.state, row.owner) == ("finalized", owner)
    # What a trainer has had may be in a step that was killed, and will be asked for as it was.
    response = await proxy.http.post("/rl/v1/export_trajectories", json={"session_ids": [had]})
    refusal(response, 409, "in_training")
    assert list(await proxy.export(exported)) == [exported]
    await proxy.client.set_run("finished", step=1, checkpoint=None)
    assert list(await proxy.export(had)) == [had]


class Counted(dict[str, RecordedSession]):
    """Counts how often a session is looked at."""

    looks = 0

    def get(self, id: str, default: Any = None) -> Any:
        self.looks += 1
        return super().get(id, default)


def finalized(live: dict[str, RecordedSession], number: int) -> RecordedSession:
    row = make_row(f"s{number}", created_at=float(number), state=SessionState.FINALIZED)
    return live.setdefault(row.id, RecordedSession(row))


def index_of(live: dict[str, RecordedSession]) -> LeaseIndex:
    return LeaseIndex(live, GroupBook(SessionIds(0), timeout=60, min_size=1))


def test_a_poll_looks_at_what_it_returns_alone() -> None:
    live = Counted()
    leasable = index_of(live)
    for k in range(1000):
        leasable.update(finalized(live, k))
    assert [s.id for (s,) in leasable.first(2)] == ["s0", "s1"]
    live.looks = 0
    for _ in range(100):
        leasable.first(1)
    assert live.looks == 100


def test_without_a_polling_trainer_nothing_piles_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 10)
    live: dict[str, RecordedSession] = {}
    leasable = index_of(live)
    for k in range(100):
        session = finalized(live, k)
        leasable.update(session)
        if k != 50:
            session.row = replace(session.row, state=SessionState.ABORTED)
            del live[session.id]
            leasable.update(session)
    kept = [each for each in vars(leasable).values() if isinstance(each, list | set | dict)]
    assert sum(map(len, kept)) < 20
    assert [s.id for (s,) in leasable.first(2)] == ["s50"]
