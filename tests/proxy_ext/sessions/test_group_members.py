"""A group's place whose session was aborted, for another session to take."""

from __future__ import annotations

from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.sessions import abort, awaiting


async def slots(proxy: Proxy) -> tuple[int, int, int]:
    now = await proxy.capacity()
    return now["admitted"], now["reserved"], now["running"]


async def test_another_session_takes_the_place(start: Start) -> None:
    proxy = await start(admit=2)
    first = await proxy.open(group_id="g", group_size=2)
    done = await proxy.finished_session(group_id="g", group_size=2)
    aborted = await abort(proxy, first, reason="it failed", keep_place=True)
    assert (aborted["state"], aborted["reason"]) == ("aborted", "it failed")
    assert await proxy.lease() == [], "the group waits for who takes the place"
    # Its slot is the group's, though the cap is reached.
    assert await slots(proxy) == (3, 1, 0)
    again = await proxy.finished_session(group_id="g", group_size=2)
    assert await slots(proxy) == (3, 0, 0)
    leased = {trajectory.session_id for trajectory in await proxy.lease()}
    assert leased == {done["session_id"], again["session_id"]}
    late = await proxy.http.post("/rl/v1/start_session", json={"group_id": "g", "group_size": 2})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "group_closed")


async def test_without_a_kept_place_the_group_closes_smaller(start: Start) -> None:
    proxy = await start(admit=3)
    first = await proxy.open(group_id="g", group_size=3)
    for _ in range(2):
        await proxy.finished_session(group_id="g", group_size=3)
    await abort(proxy, first)
    assert len(await proxy.lease()) == 2
    # A session without a group has no place to keep.
    await proxy.admit(4)
    await abort(proxy, await proxy.open(), keep_place=True)
    assert await slots(proxy) == (4, 0, 0)


async def test_a_tasks_earlier_group_has_no_place_for_others(start: Start) -> None:
    """Those who come join the next one: the earlier one would wait for its time to be over."""
    proxy = await start(admit=6)
    task = {"task_id": "t", "group_size": 3}
    first = await proxy.open(**task)
    done = [(await proxy.finished_session(**task))["session_id"] for _ in range(2)]
    assert (await proxy.open(**task))["group_id"] != first["group_id"]
    await abort(proxy, first, keep_place=True)
    assert {trajectory.session_id for trajectory in await proxy.lease()} == set(done)


async def test_a_group_of_nobody_keeps_its_slots_until_its_time_is_over(start: Start) -> None:
    proxy = await start(admit=2)
    for _ in range(3):
        await abort(proxy, await proxy.open(group_id="g", group_size=2), keep_place=True)
    assert await slots(proxy) == (5, 2, 0)
    (group,) = proxy.service.sessions.groups.all()
    group.deadline = 0.0
    await until(lambda: not proxy.service.sessions.groups.all())
    assert await slots(proxy) == (3, 0, 0)


async def test_places_outlive_a_restart(start: Start) -> None:
    settings = ("rollout.deterministic=true", "rollout.max_failures=1")
    proxy = await start(*settings, admit=3)
    done = await proxy.finished_session(group_id="g", group_size=3)
    for _ in range(2):
        await abort(proxy, await proxy.open(group_id="g", group_size=3), keep_place=True)
    assert await slots(proxy) == (5, 2, 0)
    again = await start(*settings)
    assert await slots(again) == (5, 2, 0)
    await again.admit(5)
    more = [await again.finished_session(group_id="g", group_size=3) for _ in range(2)]
    assert await slots(again) == (5, 0, 0)
    leased = {trajectory.session_id for trajectory in await again.lease()}
    assert leased == {session["session_id"] for session in (done, *more)}


async def test_a_place_in_a_group_that_is_over_is_nobodys(start: Start) -> None:
    proxy = await start(admit=3)
    for _ in range(2):
        await proxy.finished_session(group_id="g", group_size=3)
    last = await awaiting(proxy, group_id="g", group_size=3)
    (group,) = proxy.service.sessions.groups.all()
    group.deadline = 0.0
    await until(lambda: group.expired)
    await abort(proxy, last, keep_place=True)
    assert len(await proxy.lease()) == 2
    assert await slots(proxy) == (3, 0, 0)
