"""What the trainer is told of those that wait, and which of its messages count."""

from __future__ import annotations

import asyncio

import pytest

from proxy_ext.sessions import slots as admission
from proxy_ext.sessions.slots import Admission
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start


async def test_the_queue_is_told_in_its_order(start: Start) -> None:
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


async def test_one_that_did_not_wait_is_remembered_until_it_is_served(start: Start) -> None:
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
    lane = await proxy.open(mode="eval")
    await proxy.complete(lane["api_key"])
    await proxy.post("/rl/v1/finalize", {}, lane["api_key"])
    body = {"api_key": lane["api_key"]}
    assert (await proxy.http.post("/rl/v1/start_session", json=body)).status_code == 429
    assert (await proxy.capacity())["queue"] == [1]


async def test_wishes_are_forgotten_in_time_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Admission(max_waiting=9)
    for number in range(200):
        slots.remember(f"g{number}", 1)
    assert len(slots.queue) == admission.MAX_SHOWN
    slots.request(5)
    assert slots.queue[0] == 5
    monkeypatch.setattr(admission, "RECALL_SECONDS", -1.0)
    slots.remember("g0", 2)
    assert slots.queue == [5] + [1] * (admission.MAX_SHOWN - 1)


async def test_a_message_that_comes_late_changes_nothing(proxy: Proxy) -> None:
    held = (await proxy.finished_session())["session_id"]
    await proxy.lease()
    for number, limit, expected in ((7, 20, 20), (8, 3, 3), (7, 50, 3), (8, 4, 4)):
        now = await proxy.admit(limit, number=number, held=[held])
        assert now["limit"] == expected
    # Another trainer counts anew.
    assert (await proxy.admit(9, owner="next", number=1))["limit"] == 9
