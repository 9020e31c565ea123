"""What is opened on a grant is its granter's: polls never get it, and no training need go on."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from any_agent.protocol.rl import GRANT_ONLY_HEADER
from any_agent.types import SessionState
from proxy_ext.journal.base import EXPORT_OWNER, GRANT_OWNER
from tests.proxy_ext.api.test_refusals import refusal
from tests.support.areal_client import ArealClient, Episode
from tests.support.proxy import Proxy
from tests.support.proxy_fixtures import Start
from tests.support.sessions import unwritable


async def granted(client: ArealClient, *, end: bool = True) -> Episode:
    """An episode on a grant, with a call and a reward."""
    await client.grant_capacity()
    episode = await client.start("task")
    await episode.chat("x")
    await episode.set_last_reward(1.0)
    if end:
        await episode.end()
    return episode


async def state_of(proxy: Proxy, episode: Episode) -> tuple[SessionState, str | None]:
    row = (await proxy.service.sessions.by_id(episode.session_id)).row
    return row.state, row.owner


async def test_what_was_opened_on_a_grant_is_its_granters_alone(proxy: Proxy, start: Start) -> None:
    async with ArealClient(proxy.url, None) as client:
        waiting = asyncio.create_task(proxy.lease(wait=60))
        episode = await granted(client)
    id = episode.session_id
    ours = await proxy.finished_session()
    assert [t.session_id for t in await waiting] == [ours["session_id"]]
    assert await proxy.lease() == []
    # A trainer that names it is told why not.
    for more, code in (({}, "on_a_grant"), ({"replay": True}, "not_replayable")):
        body = {"owner": "trainer", "session_ids": [id], **more}
        refusal(await proxy.http.post("/rl/v1/lease", json=body), 409, code)
    assert await state_of(proxy, episode) == (SessionState.FINALIZED, GRANT_OWNER)
    response = await proxy.http.post("/rl/v1/lease", json={"owner": GRANT_OWNER})
    assert refusal(response, 400, "invalid_request")["param"] == "owner"
    # Neither a trainer's messages nor a second export end an export; given back it is as before.
    await proxy.export(id)
    await proxy.admit(1000)
    assert len(await proxy.export(id)) == 1
    assert proxy.service.leases.leased_by(EXPORT_OWNER) == {id}
    await proxy.service.leases.give_back([id], EXPORT_OWNER)
    again = await start(admit=1000)
    assert await again.lease() == []
    assert await state_of(again, episode) == (SessionState.FINALIZED, GRANT_OWNER)
    async with ArealClient(again.url, None) as client:
        assert len(await client.export(id)) == 1
    assert await state_of(again, episode) == (SessionState.TRAINED, EXPORT_OWNER)


async def test_what_a_grant_opened_is_not_in_the_trainers_way(proxy: Proxy, start: Start) -> None:
    """Nobody may ever export it: the trainer must not wait for that."""

    async def counted(proxy: Proxy) -> tuple[int, int, int]:
        now = await proxy.capacity()
        return now["running"], now["buffered"], now["reserved"]

    async with ArealClient(proxy.url, None) as client:
        ended, going_on = await granted(client), await granted(client, end=False)
        assert await counted(proxy) == (0, 0, 0)
        await proxy.export(ended.session_id)
        assert await counted(proxy) == (0, 0, 0)
        await proxy.open()
        await proxy.finished_session()
        assert await counted(proxy) == (1, 1, 0)
    again = await start()
    assert await counted(again) == (1, 1, 0)
    response = await again.post("/rl/v1/finalize", {}, going_on.api_key)
    assert response.json()["state"] == "finalized"
    assert await counted(again) == (1, 1, 0)


@pytest.mark.parametrize("finished", [False, True])
async def test_without_training_a_session_opens_on_a_grant_alone(
    start: Start, finished: bool
) -> None:
    proxy = await start(training=finished)
    if finished:
        await proxy.client.set_run("finished", step=3, checkpoint=None)
    body = {"task_id": "task"}
    async with ArealClient(proxy.url, None) as client:
        episode = await granted(client)
        refusal(await proxy.post("/rl/start_session", body), 409, "run_finished")
        # Grants are not for our own opens.
        await client.grant_capacity()
        refusal(await proxy.post("/rl/v1/start_session", {}), 409, "run_finished")
        assert len(await client.export(episode.session_id)) == 1


async def test_a_grant_that_another_open_takes_is_not_counted_on(start: Start) -> None:
    proxy = await start(training=False)
    async with ArealClient(proxy.url, None) as client:
        await client.grant_capacity()
        body: dict[str, Any] = {"task_id": "task"}
        opens = (proxy.post("/rl/start_session", body) for _ in range(4))
        answers: list[httpx.Response] = await asyncio.gather(*opens)
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]


async def test_a_grant_that_is_not_used_can_be_taken_back(proxy: Proxy, start: Start) -> None:
    async with ArealClient(proxy.url, None) as client:
        assert await client.grant_capacity() == {"capacity": 1}
        assert (await proxy.capacity())["grants"] == 1
        back = {"change": -1}
        with unwritable(proxy.service.journal):
            response = await proxy.post("/grant_capacity", back)
            assert response.json()["error"]["code"] == "store_unavailable"
        for body, left in (({"of": "run"}, 1), (back | {"of": "run"}, 0), (back, 0)):
            response = await proxy.post("/grant_capacity", body)
            assert response.json() == {"capacity": left}
        refusal(await proxy.post("/grant_capacity", back), 409, "no_grant")
        refusal(await proxy.post("/grant_capacity", {"change": 2}), 400, "invalid_request")
        assert (await proxy.capacity())["grants"] == 0
    again = await start()
    assert (await again.capacity())["grants"] == 0


async def test_an_open_for_a_grant_alone_ends_nothing_without_one(proxy: Proxy) -> None:
    """The session before goes on: nobody was given the next one."""
    async with ArealClient(proxy.url, None) as client:
        episode = await granted(client, end=False)
        body = {"task_id": "task", "api_key": episode.api_key}
        for more, headers in (({"grant_only": True}, {}), ({}, {GRANT_ONLY_HEADER: "1"})):
            response = await proxy.post("/rl/start_session", body | more, **headers)
            refusal(response, 429, "no_capacity")
        assert (await state_of(proxy, episode))[0] is SessionState.OPEN
        await client.grant_capacity()
        response = await proxy.post("/rl/start_session", body, **{GRANT_ONLY_HEADER: "1"})
        assert response.json()["session_id"] == "task-0-1"
        assert (await state_of(proxy, episode))[0] is SessionState.FINALIZED
