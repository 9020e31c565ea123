"""Groups that lose members: closed when their time is over, or with places for others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy_ext.sessions.groups import Group
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.sessions import abort, awaiting, info, slots


async def refused(proxy: Proxy, status: int, code: str, **fields: Any) -> None:
    refusal(await proxy.http.post("/rl/v1/start_session", json=fields), status, code)


def end_time(proxy: Proxy) -> Group:
    """The time of the newest group is over."""
    group = proxy.service.sessions.groups.all()[-1]
    group.deadline = 0.0
    return group


async def test_a_partial_group_closes_when_its_time_is_over(start: Start) -> None:
    proxy = await start(admit=8)
    for _ in range(2):
        await proxy.finished_session(task_id="t", group_size=4)
    still_open = await proxy.open(task_id="t", group_size=4)
    assert await proxy.lease() == []
    end_time(proxy)
    trajectories = await proxy.lease(wait=60)
    assert len(trajectories) == 2
    late = refusal(await proxy.call(still_open["api_key"]), 410, "session_closed")
    assert late["state"] == "expired"
    now = await proxy.capacity()
    assert (now["admitted"], now["reserved"]) == (3, 0)
    # The next generation is not bound to what the last one shrank to.
    await proxy.open(task_id="t", group_size=2)
    # A named one stays closed, after a restart too.
    for _ in range(2):
        await proxy.finished_session(group_id="g", group_size=3)
    end_time(proxy)
    assert len(await proxy.lease(wait=60)) == 2
    again = await start(admit=9)
    await refused(again, 409, "group_closed", group_id="g", group_size=3)


async def test_the_trainer_is_told_which_groups_are_waited_for(start: Start) -> None:
    proxy = await start("sessions.group_timeout=1000", admit=12)
    assert (await proxy.capacity())["unfilled"] == []
    for size, name in ((4, "g"), (1, "full"), (3, "h")):
        await proxy.finished_session(group_id=name, group_size=size)
    await proxy.open(group_id="h", group_size=3)
    found = (await proxy.capacity())["unfilled"]
    assert [0 < group.pop("closes_in") <= 1000 for group in found] == [True, True]
    # The one that began first closes first.
    assert found == [
        {"group_id": "g", "size": 4, "members": 1},
        {"group_id": "h", "size": 3, "members": 2},
    ]
    await proxy.open(group_id="h", group_size=3)
    assert [group["group_id"] for group in (await proxy.capacity())["unfilled"]] == ["g"]


async def test_a_group_that_is_too_small_is_rejected(start: Start) -> None:
    proxy = await start("sessions.min_group_size=3", admit=8)
    done = [await proxy.finished_session(group_id="g", group_size=4) for _ in range(2)]
    last = await awaiting(proxy, group_id="g", group_size=4)
    group = end_time(proxy)
    await until(lambda: group.expired)
    assert await proxy.lease() == [], "the group waits for its reward"
    await abort(proxy, last)
    await until(lambda: not proxy.service.sessions.live)
    assert await proxy.lease() == []
    for session in done:
        now = await info(proxy, session)
        assert (now["state"], now["reason"]) == ("rejected", "group_too_small")
    now = await proxy.capacity()
    assert (now["admitted"], now["reserved"], now["buffered"]) == (3, 0, 0)
    assert 'any_agent_groups_too_small_total{rank="0"} 1' in (await proxy.http.get("/metrics")).text
    await refused(proxy, 409, "group_closed", group_id="g", group_size=4)


async def test_members_that_open_at_once_all_get_in(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One looks the group's name up in the journal while another one begins the group."""
    proxy = await start(admit=8)
    journal = proxy.service.journal
    looked, go, look = asyncio.Event(), asyncio.Event(), journal.group

    async def late(group_id: str) -> Any:
        if not looked.is_set():
            looked.set()
            await go.wait()
        return await look(group_id)

    monkeypatch.setattr(journal, "group", late)
    first = asyncio.create_task(proxy.open(group_id="g", group_size=2))
    await asyncio.wait_for(looked.wait(), 60)
    await proxy.open(group_id="g", group_size=2)
    go.set()
    await first
    await refused(proxy, 409, "group_closed", group_id="g", group_size=2)


async def test_another_session_takes_the_place_after_a_restart_too(start: Start) -> None:
    settings = ("rollout.deterministic=true", "rollout.max_failures=1")
    proxy = await start(*settings, admit=3)
    done = await proxy.finished_session(group_id="g", group_size=3)
    for _ in range(2):
        opened = await proxy.open(group_id="g", group_size=3)
        aborted = await abort(proxy, opened, reason="it failed", keep_place=True)
        assert (aborted["state"], aborted["reason"]) == ("aborted", "it failed")
    assert await proxy.lease() == [], "the group waits for who takes the place"
    # Its slots are the group's, though the cap is reached.
    again = await start(*settings)
    for each in (proxy, again):
        assert await slots(each) == (5, 2, 0)
    await again.admit(5)
    more = [await again.finished_session(group_id="g", group_size=3) for _ in range(2)]
    assert await slots(again) == (5, 0, 0)
    leased = {trajectory.session_id for trajectory in await again.lease()}
    assert leased == {session["session_id"] for session in (done, *more)}
    await refused(again, 409, "group_closed", group_id="g", group_size=3)
    # A session without a group has no place to keep.
    await again.admit(6)
    await abort(again, await again.open(), keep_place=True)
    assert await slots(again) == (6, 0, 0)


async def test_a_tasks_earlier_group_has_no_place_for_others(start: Start) -> None:
    """Those who come join the next one: the earlier one would wait for its time to be over."""
    proxy = await start(admit=6)
    task = {"task_id": "t", "group_size": 3}
    first = await proxy.open(**task)
    done = [(await proxy.finished_session(**task))["session_id"] for _ in range(2)]
    assert (await proxy.open(**task))["group_id"] != first["group_id"]
    await abort(proxy, first, keep_place=True)
    assert {trajectory.session_id for trajectory in await proxy.lease()} == set(done)


async def test_no_session_gets_a_place_in_a_group_that_is_over(start: Start) -> None:
    proxy = await start(admit=3)
    for _ in range(2):
        await proxy.finished_session(group_id="g", group_size=3)
    last = await awaiting(proxy, group_id="g", group_size=3)
    group = end_time(proxy)
    await until(lambda: group.expired)
    await abort(proxy, last, keep_place=True)
    assert len(await proxy.lease()) == 2
    assert await slots(proxy) == (3, 0, 0)
