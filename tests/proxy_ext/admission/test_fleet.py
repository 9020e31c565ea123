"""A rank in a fleet that changes: what it begins, what it goes on with, when it is done."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from any_agent.launcher.trial import trial_dir
from any_agent.rundir.fleet import Fleet, save_fleet
from proxy_ext.server import entry_of
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Restart
from tests.support.sessions import finalize

HEADER = "x-any-agent-fleet"
START = "/rl/v1/start_session"
DRAINED = Fleet.of(2).with_state(0, "draining")


def change(proxy: Proxy, fleet: Fleet) -> None:
    save_fleet(trial_dir(proxy.service.config).fleet, fleet)


async def retire(proxy: Proxy) -> None:
    change(proxy, DRAINED)
    await until(lambda: proxy.service.opening.retired, "the rank retires")


async def ask(proxy: Proxy, choice: str, **fields: Any) -> httpx.Response:
    return await proxy.post(START, fields, **{HEADER: choice})


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


MISDIRECTED, DRAINING = (421, "misdirected"), (503, "draining")


@pytest.mark.parametrize("name", ["group_id", "task_id"])
async def test_a_member_only_open_begins_no_group(proxy: Proxy, name: str) -> None:
    assert refusal(await ask(proxy, "1 member", **{name: "g"})) == MISDIRECTED
    first = await ask(proxy, "1", **{name: "g"})
    second = await ask(proxy, "1 member", **{name: "g"})
    assert first.json()["group_id"] == second.json()["group_id"]
    # It has both members now: a named one is closed for good, a task begins another one.
    full = refusal(await ask(proxy, "1 member", **{name: "g"}))
    assert full == ((409, "group_closed") if name == "group_id" else MISDIRECTED)
    for fields in ({}, {"mode": "eval"}):
        assert refusal(await ask(proxy, "1 member", **fields)) == MISDIRECTED


async def test_after_a_restart_no_member_joins_a_group_that_has_ended(restart: Restart) -> None:
    proxy = await restart()
    for _ in range(2):
        await proxy.finished_session(group_id="g")
    proxy = await restart()
    assert refusal(await ask(proxy, "1 member", group_id="g")) == (409, "group_closed")


async def test_whoever_denied_a_group_does_not_begin_it_for_an_older_fleet(proxy: Proxy) -> None:
    """Else two routers could begin it at two ranks."""
    grown = Fleet.of(2).with_state(2, "serving")
    change(proxy, grown)
    assert refusal(await ask(proxy, "2 member", group_id="g")) == MISDIRECTED
    assert proxy.service.fleet.fleet == grown, "it has not waited for its next look"
    assert refusal(await ask(proxy, "1", group_id="g")) == MISDIRECTED
    for fields in ({}, {"mode": "eval"}):
        assert refusal(await ask(proxy, "1", **fields)) == MISDIRECTED
    assert (await ask(proxy, "2", group_id="g")).status_code == 200
    # Of a group that it has, it takes a member, whatever the router knows.
    assert (await ask(proxy, "1", group_id="g")).status_code == 200
    # A number that no file has changes nothing.
    for number in ("999999", "nonsense"):
        assert (await ask(proxy, number, group_id=number)).status_code == 200


async def test_a_draining_rank_takes_members_of_its_groups_alone(proxy: Proxy) -> None:
    first = await proxy.open(group_id="g")
    lane = await proxy.finished_session(mode="eval")
    await retire(proxy)
    for fields in ({"group_id": "h"}, {"task_id": "t"}, {}, {"mode": "eval"}):
        assert refusal(await proxy.post(START, fields)) == DRAINING
    with_key = await proxy.post(START, {"mode": "eval", "api_key": lane["api_key"]})
    assert refusal(with_key) == (409, "lane_on_other_rank")
    assert refusal(await proxy.post("/grant_capacity", {})) == DRAINING
    second = await proxy.finished_session(group_id="g")
    await proxy.complete(first["api_key"])
    await finalize(proxy, first, final_reward=1.0)
    leased = await proxy.lease()
    assert {t.session_id for t in leased} == {first["session_id"], second["session_id"]}


async def test_opens_that_wait_for_a_slot_are_sent_away(proxy: Proxy) -> None:
    await proxy.admit(0)
    waiting = [
        asyncio.create_task(ask(proxy, "1", group_id="g", wait=30)),
        asyncio.create_task(ask(proxy, "1", wait=30)),
    ]
    await until(lambda: proxy.service.sessions.admission.waiting == 3, "both wait")
    await retire(proxy)
    assert [refusal(each) for each in await asyncio.gather(*waiting)] == [DRAINING] * 2
    await proxy.admit(8)
    assert refusal(await ask(proxy, "2 member", group_id="g")) == MISDIRECTED, "it never began"


async def test_a_granted_slot_can_still_be_used_on_a_retiring_rank(proxy: Proxy) -> None:
    assert (await proxy.post("/grant_capacity", {})).status_code == 200
    await retire(proxy)
    assert proxy.service.unfinished == 1
    assert (await proxy.post("/rl/start_session", {"task_id": "t"})).status_code == 200


async def test_a_rank_is_done_once_its_sessions_were_trained_on(proxy: Proxy) -> None:
    def entry() -> tuple[bool, int, bool]:
        found = entry_of(proxy.service, url="u", boot_id="b")
        return found.retired, found.unfinished, found.replayable

    service = proxy.service
    assert entry_of(service, url="u", boot_id="b").led
    first = await proxy.open(group_id="g")
    assert entry() == (False, 2, True), "a place is kept for the second one"
    await retire(proxy)
    assert entry() == (True, 2, True)
    await proxy.complete(first["api_key"])
    await finalize(proxy, first, final_reward=1.0)
    second = await proxy.finished_session(group_id="g")
    assert entry() == (True, 2, True), "no step has had them"
    ids = [first["session_id"], second["session_id"]]
    await proxy.lease()
    assert entry() == (True, 2, True)
    await proxy.client.ack(owner="trainer", trained=ids, rejected=[], step=7)
    await service.follow_fleet()
    assert entry() == (True, 0, True), "no checkpoint has them"
    for oldest, replayable in ((6, True), (7, False)):
        await proxy.client.set_run("training", step=9, checkpoint="c", oldest_step=oldest)
        await service.follow_fleet()
        assert entry() == (True, 0, replayable)


async def test_a_rank_without_a_session_is_done_at_once(proxy: Proxy) -> None:
    await retire(proxy)
    await proxy.service.follow_fleet()
    found = entry_of(proxy.service, url="u", boot_id="b")
    assert (found.retired, found.unfinished, found.replayable) == (True, 0, False)


async def test_quotas_are_shared_by_the_ranks_that_serve(proxy: Proxy) -> None:
    change(proxy, Fleet.of(2).with_state(2, "serving"))
    await until(lambda: proxy.service.quotas.ranks == 3)
