"""Opening sessions: slots, the queue that the trainer sees, groups, lanes."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx
import pytest

from any_agent.client.rl_client import RLClient
from any_agent.errors import RunFinished
from proxy_ext.sessions import slots as admission
from proxy_ext.sessions.slots import Admission
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import Proxy, signer, until
from tests.support.proxy_fixtures import Start
from tests.support.sessions import finalize, hold_commits, played, slots


def start_waiting(proxy: Proxy, **fields: Any) -> asyncio.Task[httpx.Response]:
    """An open that waits for a slot."""
    body = {"wait": 10, **fields}
    return asyncio.create_task(proxy.http.post("/rl/v1/start_session", json=body))


async def waiting(proxy: Proxy, slots: int) -> None:
    await until(lambda: proxy.service.sessions.admission.waiting == slots)


async def refused(proxy: Proxy, status: int, code: str, **fields: Any) -> None:
    refusal(await proxy.http.post("/rl/v1/start_session", json=fields), status, code)


async def test_an_open_answers_with_the_session_and_its_key(start: Start) -> None:
    proxy = await start("sessions.ttl=100")
    session = await proxy.open(task_id="task", mode="eval", ttl=60, metadata={"a": [1]})
    assert session["base_url"] == f"{proxy.url}/v1"
    assert (session["mode"], session["version"], session["task_id"]) == ("eval", 0, "task")
    assert session["expires_in"] == pytest.approx(60, abs=1)
    # A ttl over the run's is cut.
    assert (await proxy.open(mode="eval", ttl=5000))["expires_in"] == pytest.approx(100)


async def test_the_limit_counts_every_session_ever_admitted(start: Start) -> None:
    proxy = await start()
    await refused(proxy, 429, "no_capacity")
    for _ in range(3):  # a repeated message changes nothing
        await proxy.admit(2)
    await proxy.finished_session()
    await proxy.finished_session()
    response = await proxy.http.post("/rl/v1/start_session", json={})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    # Eval sessions take no slot.
    await proxy.open(mode="eval")
    now = await proxy.admit(3)
    assert (now["admitted"], now["running"], now["buffered"]) == (2, 0, 2)
    await proxy.open()
    now = await proxy.admit(1)  # below what there is: nobody is thrown out
    assert (now["admitted"], now["running"]) == (3, 1)
    await refused(proxy, 429, "no_capacity")
    # It lapses when its setter is silent.
    await proxy.admit(9, ttl=0.05)
    await until(lambda: not proxy.service.sessions.admission.limited)
    await refused(proxy, 429, "no_capacity")


async def test_opens_wait_in_the_order_of_asking(start: Start) -> None:
    proxy = await start("sessions.max_waiting=4")
    opens = []
    for k in range(4):
        opens.append(start_waiting(proxy, metadata={"k": k}))
        await waiting(proxy, k + 1)
    await refused(proxy, 429, "no_capacity", wait=10)
    # One that leaves frees its place.
    opens.pop(1).cancel()
    await waiting(proxy, 3)
    assert (await proxy.capacity())["waiting"] == 3
    for k, task in enumerate(opens):
        await proxy.admit(k + 1)
        assert (await task).status_code == 200
        await waiting(proxy, 2 - k)
    rows = [s.row.metadata["k"] for s in proxy.service.sessions.live.values()]
    assert rows == [0, 2, 3]
    assert (await proxy.capacity())["admitted"] == 3


async def test_waiting_opens_hear_at_once_that_the_run_has_finished(start: Start) -> None:
    proxy = await start()
    client = RLClient(proxy.url)
    opens = [
        asyncio.create_task(client.start_session(wait=60)),
        asyncio.create_task(client.start_session(wait=60, group_id="g", group_size=2)),
        asyncio.create_task(client.start_session(wait=60, task_id="t", group_size=2)),
    ]
    await waiting(proxy, 5)
    async with asyncio.timeout(60):
        await proxy.client.set_run("finished", step=7, checkpoint="/ckpt")
        for task in opens:
            with pytest.raises(RunFinished):
                await task
    response = await proxy.http.post("/rl/v1/start_session", json={"wait": 60})
    error = refusal(response, 409, "run_finished")
    assert (error["run"]["checkpoint"], error["run"]["step"]) == ("/ckpt", 7)
    # Inference and eval go on, without a session too.
    await played(proxy, mode="eval")
    assert (await proxy.call(None)).status_code == 200
    assert (await proxy.call("DUMMY")).status_code == 200
    assert (await proxy.http.get("/rl/v1/run")).json()["state"] == "finished"
    await client.close()


@pytest.mark.parametrize("group", [{}, {"group_id": "g", "group_size": 3}])
async def test_a_session_that_is_being_written_has_its_slot(
    start: Start, monkeypatch: pytest.MonkeyPatch, group: dict[str, Any]
) -> None:
    """Neither open nor lost: the trainer would otherwise give its slot away a second time."""
    proxy = await start()
    _, go = hold_commits(proxy.service.journal, monkeypatch)
    wanted = 3 if group else 2
    tasks = [start_waiting(proxy, **group) for _ in range(4 if group else 2)]
    await waiting(proxy, wanted)
    await proxy.admit(3)
    assert await slots(proxy) == (wanted, wanted, 0)
    go.set()
    # One member too many is refused meanwhile.
    statuses = sorted([(await task).status_code for task in tasks])
    assert statuses == ([200] * 3 + [409] if group else [200] * 2)
    assert await slots(proxy) == (wanted, 0, wanted)


def _done(tasks: list[asyncio.Task[httpx.Response]], number: int) -> bool:
    return sum(task.done() for task in tasks) == number


async def test_groups_that_arrive_together_cannot_starve_each_other(start: Start) -> None:
    """Sixteen opens of four groups, and slots for one group at a time: all get in."""
    proxy = await start()
    tasks = [
        start_waiting(proxy, group_id=f"g{k % 4}", group_size=4, metadata={"g": k % 4})
        for k in range(16)
    ]
    await waiting(proxy, 16)
    for done in range(4):
        await proxy.admit(4 * (done + 1))
        await until(partial(_done, tasks, 4 * (done + 1)))
        full = [s.row.metadata["g"] for s in proxy.service.sessions.live.values()]
        assert all(full.count(g) in (0, 4) for g in range(4)), full
    assert [t.result().status_code for t in tasks] == [200] * 16


async def test_a_waiting_group_holds_back_those_behind_it(start: Start) -> None:
    proxy = await start()
    group = start_waiting(proxy, group_id="g", group_size=2)
    await waiting(proxy, 2)
    single = start_waiting(proxy)
    await waiting(proxy, 3)
    await proxy.admit(1)
    await proxy.http.get("/healthz")
    assert not single.done(), "a group that needs two slots would never get them"
    await proxy.admit(3)
    assert (await group).status_code == (await single).status_code == 200


async def test_group_sizes_must_agree_and_fit(start: Start) -> None:
    proxy = await start("rollout.max_concurrent=4", admit=9)
    await refused(proxy, 400, "invalid_request", group_id="never", group_size=5)
    await proxy.open(group_id="g", group_size=3)
    await refused(proxy, 409, "group_size_mismatch", group_id="g", group_size=2)
    await refused(proxy, 409, "group_size_mismatch", group_id="g")
    await proxy.open(group_id="g", group_size=3)
    # Another size is a matter of a task's next generation, not of one that is full.
    ids = [(await proxy.open(task_id="t"))["group_id"] for _ in range(2)]
    assert ids[0] == ids[1] != (await proxy.open(task_id="t", group_size=4))["group_id"]


@pytest.mark.parametrize("name", ["task_id", "group_id"])
async def test_one_too_many_that_waited_joins_a_tasks_next_generation_alone(
    start: Start, name: str
) -> None:
    proxy = await start()
    tasks = [start_waiting(proxy, **{name: "x"}, group_size=8) for _ in range(9)]
    await until(lambda: [g.openers for g in proxy.service.sessions.groups.all()] == [9])
    await proxy.admit(8)
    if name == "task_id":
        await until(partial(_done, tasks, 8))
        await waiting(proxy, 8)  # the ninth one's generation
        await proxy.admit(16)
    answers = [answer.json() for answer in await asyncio.gather(*tasks)]
    if name == "task_id":
        ids = [answer["group_id"] for answer in answers]
        assert sorted(ids.count(id) for id in set(ids)) == [1, 8]
        assert await slots(proxy) == (16, 7, 9)
    else:
        (late,) = [answer for answer in answers if "error" in answer]
        assert late["error"]["code"] == "group_closed"
        assert await slots(proxy) == (8, 0, 8)


async def test_while_a_session_is_being_ended_it_takes_no_more_calls(proxy: Proxy) -> None:
    """Its end waits for answers that are being recorded, and a new call must not prolong that."""
    opened = await proxy.open(mode="eval")
    session = proxy.service.sessions.live[opened["session_id"]]
    session.closing = True
    refusal(await proxy.call(opened["api_key"]), 410, "session_closed")
    session.closing = False
    assert (await proxy.call(opened["api_key"])).status_code == 200


async def test_a_key_opens_its_next_session(proxy: Proxy) -> None:
    """For agents that read their key once."""
    first = await proxy.finished_session()
    key = first["api_key"]
    second = await proxy.open(api_key=key)
    assert second["api_key"] == key and second["session_id"] != first["session_id"]
    await refused(proxy, 409, "lane_busy", api_key=key)
    # The first one's end must not take the key away from the second.
    await proxy.lease()
    await proxy.client.ack(owner="trainer", trained=[first["session_id"]], rejected=[])
    await proxy.complete(key)
    assert (await finalize(proxy, second, final_reward=1))["interactions"] == 1
    await refused(proxy, 401, "invalid_api_key", api_key="sk-v1.0.x")
    _, elsewhere = signer(proxy).mint(3)
    await refused(proxy, 409, "lane_on_other_rank", api_key=elsewhere, mode="eval")


async def test_a_key_opens_one_session_at_a_time(start: Start) -> None:
    proxy = await start(admit=1)
    key = (await proxy.finished_session())["api_key"]
    one = start_waiting(proxy, api_key=key)
    await waiting(proxy, 1)
    await refused(proxy, 409, "lane_busy", api_key=key, wait=5)
    await proxy.admit(5)
    assert (await one).status_code == 200


async def test_capacity_tells_the_waiting_opens_in_their_order(start: Start) -> None:
    proxy = await start()
    opens = []
    for fields in ({"group_id": "g", "group_size": 3}, {}, {"task_id": "t", "group_size": 2}):
        opens.append(asyncio.create_task(proxy.open(**fields, wait=60)))
        await until(
            lambda: proxy.service.sessions.admission.waiting == sum([3, 1, 2][: len(opens)])
        )
    now = await proxy.capacity()
    assert (now["queue"], now["waiting"]) == ([3, 1, 2], 6)
    assert (await proxy.admit(3))["queue"] == [1, 2]
    assert (await proxy.admit(6))["queue"] == []
    await asyncio.gather(*opens)


async def test_an_open_that_did_not_wait_is_remembered_until_served(start: Start) -> None:
    proxy = await start()
    for _ in range(2):  # asking twice is one wish
        response = await proxy.http.post(
            "/rl/v1/start_session", json={"group_id": "g", "group_size": 2}
        )
        assert response.status_code == 429
    now = await proxy.capacity()
    # Nobody waits, but somebody will ask for two.
    assert (now["queue"], now["waiting"]) == ([2], 0)
    await proxy.admit(2)
    await proxy.open(group_id="g", group_size=2)
    assert (await proxy.capacity())["queue"] == []
    # A single session may go to any rank, a lane's next one may not.
    assert (await proxy.http.post("/rl/v1/start_session", json={})).status_code == 429
    assert (await proxy.capacity())["queue"] == []
    lane = await played(proxy, mode="eval")
    await proxy.post("/rl/v1/finalize", {}, lane["api_key"])
    body = {"api_key": lane["api_key"]}
    assert (await proxy.http.post("/rl/v1/start_session", json=body)).status_code == 429
    assert (await proxy.capacity())["queue"] == [1]


async def test_remembered_opens_are_forgotten_in_time_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = Admission(max_waiting=9)
    for number in range(200):
        slots.remember(f"g{number}", 1)
    assert len(slots.queue) == admission.MAX_SHOWN
    slots.request(5)
    assert slots.queue[0] == 5
    monkeypatch.setattr(admission, "RECALL_SECONDS", -1.0)
    slots.remember("g0", 2)
    assert slots.queue == [5] + [1] * (admission.MAX_SHOWN - 1)


async def test_a_late_message_of_the_trainer_does_not_undo_a_newer_limit(proxy: Proxy) -> None:
    held = (await proxy.finished_session())["session_id"]
    await proxy.lease()
    for number, limit, expected in ((7, 20, 20), (8, 3, 3), (7, 50, 3), (8, 4, 4)):
        now = await proxy.admit(limit, number=number, held=[held])
        assert now["limit"] == expected
    # Another trainer counts anew.
    assert (await proxy.admit(9, owner="next", number=1))["limit"] == 9
