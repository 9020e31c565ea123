"""A trainer that another one took over from can do nothing more, also after the rank's restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from any_agent.client.rl_client import RLClient
from any_agent.errors import AnyAgentError, StaleOwner
from any_agent.protocol.rl import EPOCH_HEADER
from any_agent.protocol.training import Rejection
from proxy_ext.server import entry_of
from tests.support.errors import fails_with
from tests.support.proxy import LIMIT, Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.sessions import count_polls

Deed = Callable[[RLClient], Awaitable[object]]
DEEDS: dict[str, Deed] = {
    "capacity": lambda c: c.set_capacity(limit=9, ttl=60, owner="old", held=[], number=99),
    "lease": lambda c: c.lease(owner="old", wait=0),
    "replay": lambda c: c.replay(owner="old", session_ids=["ses-0-x"]),
    "ack": lambda c: c.ack(
        owner="old", trained=["ses-0-x"], rejected=[Rejection(session_id="ses-0-y", reason="z")]
    ),
    "pause": lambda c: c.pause(ttl=60),
    "version": lambda c: c.publish_version(version=7, path="/w", step=1),
    "resume": lambda c: c.resume(),
    "run": lambda c: c.set_run("finished", step=9, checkpoint=None),
}


def trainer(proxy: Proxy, epoch: int | None) -> RLClient:
    return RLClient(proxy.url, epoch=epoch, timeout=LIMIT, retry_for=0.2)


@pytest.mark.parametrize("deed", DEEDS)
async def test_a_replaced_trainer_can_do_nothing(start: Start, deed: str) -> None:
    proxy = await start()
    async with trainer(proxy, 1) as old, trainer(proxy, 2) as new, trainer(proxy, None) as person:
        assert await old.lease(owner="old", wait=0) is None
        await new.set_capacity(limit=3, ttl=60, owner="new", held=[])
        before = (await proxy.http.get("/rl/v1/run")).json()
        with fails_with(StaleOwner, "start 2", "start 1"):
            await DEEDS[deed](old)
        assert (await proxy.http.get("/rl/v1/run")).json() == before
        assert (await proxy.capacity())["limit"] == 3
        assert proxy.service.run.pauses.count == 0
        # A person has no number, and is let through.
        if deed in ("pause", "resume", "run", "lease"):
            await DEEDS[deed](person)


async def test_a_replaced_trainer_is_kept_out_after_a_restart(start: Start) -> None:
    proxy = await start()
    async with trainer(proxy, 5) as new:
        await new.set_capacity(limit=3, ttl=60, owner="new", held=[])
    # As after a kill: the journal is all that there is.
    again = await start()
    assert entry_of(again.service, url="u", boot_id="b").epoch == 5
    async with trainer(again, 4) as old, trainer(again, 6) as newer:
        with pytest.raises(StaleOwner):
            await old.lease(owner="old", wait=0)
        await newer.lease(owner="newer", wait=0)
        assert again.service.fence.epoch == 6


async def test_a_waiting_poll_of_a_replaced_trainer_gets_nothing(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = count_polls(proxy, monkeypatch)
    async with trainer(proxy, 1) as old, trainer(proxy, 2) as new:
        poll = asyncio.create_task(old.lease(owner="old", wait=60))
        await until(lambda: waiting() == 1)
        await new.set_capacity(limit=30, ttl=60, owner="new", held=[])
        session = await proxy.finished_session()
        with pytest.raises(StaleOwner):
            await poll
        (trajectory,) = await proxy.lease(owner="new")
        assert trajectory.session_id == session["session_id"]


async def test_a_malformed_epoch_number_is_refused(proxy: Proxy) -> None:
    for number in ("-1", "x", "1e3", "99999999999999999999"):
        response = await proxy.http.post("/rl/v1/resume", headers={EPOCH_HEADER: number})
        assert 400 <= response.status_code < 500, number
    assert proxy.service.fence.epoch == 0


async def test_a_caller_without_the_right_moves_no_fence(start: Start) -> None:
    proxy = await start("server.admin_key=a-long-admin-key")
    await proxy.admit(5)
    session = await proxy.open()
    for key in (None, "a-wrong-admin-key", session["api_key"]):
        client = RLClient(proxy.url, admin_key=key, epoch=9, retry_for=0.2)
        async with client:
            with pytest.raises(AnyAgentError) as refused:
                await client.resume()
        assert refused.value.status in (401, 403)
    assert proxy.service.fence.epoch == 0
