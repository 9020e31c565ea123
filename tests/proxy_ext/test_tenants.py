"""What tenants may use of a rank, and that they never meet: quotas, groups, lanes, over HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx
import pytest

from any_agent.auth.access import run_dir_of
from any_agent.auth.key_store import TenantLimits, create_key
from proxy_ext.web.shared_quotas import SharedQuotas
from tests.support.proxy import LIMIT, Proxy, turned_away, until
from tests.support.proxy_fixtures import Start
from tests.support.redis_server import RedisServer

ADMIN = "server.admin_key=operator-secret-4711"


class Tenants:
    """Keys of tenants at one proxy."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    def key(self, tenant: str, **limits: float) -> str:
        path = run_dir_of(self.proxy.service.config).keys
        made = TenantLimits.model_validate(limits)
        return create_key(path, "tenant", tenant=tenant, limits=made)[0]

    async def open(self, key: str, **fields: Any) -> httpx.Response:
        body = {"mode": "eval", **fields}
        return await self.proxy.post("/rl/v1/start_session", body, key)


async def exhausted(
    ask: Callable[[], Awaitable[httpx.Response]], most: int = 50
) -> tuple[int, httpx.Response]:
    """How often it went well, and the refusal."""
    for number in range(most):
        response = await ask()
        if response.status_code != 200:
            return number, response
    raise AssertionError("it never ended")


async def test_a_tenant_opens_no_more_sessions_than_its_quota(start: Start) -> None:
    proxy = await start(ADMIN, "server.tenant_open_sessions=4", "server.ranks=1")
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice", open_sessions=2), tenants.key("bob")
    first = (await tenants.open(alice)).json()
    await tenants.open(alice)
    refused = await tenants.open(alice)
    turned_away(refused, 429, "quota_exceeded")
    assert refused.json()["error"]["quota"] == "open_sessions"
    for _ in range(4):
        assert (await tenants.open(bob)).status_code == 200
    turned_away(await tenants.open(bob), 429, "quota_exceeded")
    for _ in range(5):
        await proxy.open(mode="eval")
    again = await start(ADMIN, "server.ranks=1")
    tenants = Tenants(again)
    turned_away(await tenants.open(alice), 429, "quota_exceeded")
    response = await again.post("/rl/v1/finalize", {"await_reward": True}, first["api_key"])
    assert response.status_code == 200
    # It holds what it held until its reward is there.
    turned_away(await tenants.open(alice), 429, "quota_exceeded")
    await again.post("/rl/v1/finalize", {}, alice, **{"x-any-agent-session": first["session_id"]})
    assert (await tenants.open(alice)).status_code == 200


async def test_a_tenant_cannot_keep_every_slot_for_groups_that_nobody_is_in(start: Start) -> None:
    proxy = await start(ADMIN, "server.ranks=1", "sessions.group_size=2")
    await proxy.admit(8)
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice", open_sessions=2), tenants.key("bob")

    async def begun_and_left(name: str) -> httpx.Response:
        response = await tenants.open(alice, mode="train", group_id=name)
        if response.status_code == 200:
            path = f"/rl/v1/sessions/{response.json()['session_id']}/abort"
            assert (await proxy.post(path, {}, alice)).status_code == 200
        return response

    for name in ("a", "b"):
        assert (await begun_and_left(name)).status_code == 200
    turned_away(await begun_and_left("c"), 429, "quota_exceeded")
    assert (await tenants.open(bob, mode="train", group_id="a")).status_code == 200
    # What it has begun it can go on with, and then begin another.
    assert (await begun_and_left("a")).status_code == 200
    assert (await begun_and_left("c")).status_code == 200
    turned_away(await begun_and_left("d"), 429, "quota_exceeded")


async def test_a_waiting_open_counts_for_its_tenant_and_holds_nobody_up(start: Start) -> None:
    proxy = await start(ADMIN, "server.ranks=1", "sessions.max_waiting=3")
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice", open_sessions=2), tenants.key("bob")
    waits = [asyncio.create_task(tenants.open(alice, mode="train", wait=LIMIT)) for _ in range(2)]
    await until(lambda: proxy.service.sessions.admission.waiting == 2)
    turned_away(await tenants.open(alice, mode="train", wait=LIMIT), 429, "quota_exceeded")
    third = asyncio.create_task(tenants.open(bob, mode="train", wait=LIMIT))
    await until(lambda: proxy.service.sessions.admission.waiting == 3)
    await proxy.admit(3)
    assert [(await task).status_code for task in (*waits, third)] == [200] * 3


async def test_requests_of_a_tenant_and_of_its_sessions_count_together(start: Start) -> None:
    proxy = await start(ADMIN, "server.ranks=1")
    tenants = Tenants(proxy)
    # So slow that the test does not meet a refill.
    alice, bob = tenants.key("alice", requests_per_second=0.9), tenants.key("bob")
    started = (await tenants.open(alice)).json()
    key = started["api_key"]
    # It counts once, though its session is looked up for the query, and again for the route.
    path = f"/rl/v1/sessions/{started['session_id']}/heartbeat?session_id={started['session_id']}"
    number, refused = await exhausted(lambda: proxy.post(path, {}, key))
    assert 3 <= number <= 10, "of the burst of four and a half the open took one"
    assert refused.json()["error"]["quota"] == "requests_per_second"
    turned_away(refused, 429, "quota_exceeded")
    for ask in (
        lambda: proxy.call(key),
        lambda: proxy.post("/rl/v1/set_reward", {"reward": 1}, key),
        lambda: proxy.http.get("/rl/v1/sessions", headers={"authorization": f"Bearer {alice}"}),
        lambda: tenants.open(alice),
    ):
        _, refused = await exhausted(ask)
        turned_away(refused, 429, "quota_exceeded")
    other = (await tenants.open(bob)).json()["api_key"]
    for _ in range(20):
        assert (await proxy.call(other)).status_code == 200
    shown = (await proxy.http.get("/metrics")).text
    assert 'quotas_exceeded_total{quota="requests_per_second",rank="0"} 5.0' in shown


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tenants_calls_wait_until_their_tokens_are_paid(start: Start, stream: bool) -> None:
    proxy = await start(ADMIN, "server.ranks=1")
    tenants = Tenants(proxy)
    alice = tenants.key("alice", tokens_per_second=1)
    key = (await tenants.open(alice)).json()["api_key"]
    assert (await proxy.call(key, stream=stream)).status_code == 200
    await until(lambda: proxy.service.calls.concurrency.in_use == 0)
    (session,) = proxy.service.sessions.live.values()
    (interaction,) = session.tree
    used = len(session.tree.prompt_ids(interaction.id)) + len(interaction.output_ids)
    refused = await proxy.call(key)
    assert refused.json()["error"]["quota"] == "tokens_per_second"
    # It was full, at five seconds' worth, and refills since; the next call needs one.
    assert used > 20 and turned_away(refused, 429, "quota_exceeded") <= used - 5 + 1
    # What costs no tokens goes on.
    assert (await proxy.post("/rl/v1/set_reward", {"reward": 1}, key)).status_code == 200


async def test_two_ranks_count_the_quota_of_a_tenant_together(
    server: RedisServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long that a busy machine does not make Redis seem away.
    monkeypatch.setitem(SharedQuotas.__init__.__kwdefaults__, "timeout", LIMIT)
    settings = (ADMIN, f"server.journal={server.url}", "server.ranks=2")
    first, second = [await start(*settings, rank=rank) for rank in range(2)]

    async def exact(proxy: Proxy, yes: bool = True) -> bool:
        told = (await proxy.http.get("/healthz")).json()["quotas_exact"]
        metrics = (await proxy.http.get("/metrics")).text
        (shown,) = re.findall(r"^any_agent_quotas_exact{.*} (.*)", metrics, re.M)
        return (told, shown) == (yes, f"{yes:.1f}")

    for proxy in (first, second):
        await until(partial(exact, proxy))
    alice = Tenants(first).key("alice", open_sessions=3, requests_per_second=1000)
    opened = [(await Tenants(first).open(alice)).json() for _ in range(3)]
    refused = await Tenants(second).open(alice)
    turned_away(refused, 429, "quota_exceeded")
    assert "open_sessions (3); wait" in refused.json()["error"]["message"]
    path = f"/rl/v1/sessions/{opened[0]['session_id']}/abort"
    assert (await first.post(path, {}, opened[0]["api_key"])).status_code == 200
    await first.service.quotas.pump  # type: ignore[attr-defined]
    assert (await Tenants(second).open(alice)).status_code == 200
    turned_away(await Tenants(first).open(alice), 429, "quota_exceeded")
    server.kill()
    path = f"/rl/v1/sessions/{opened[1]['session_id']}"
    for _ in range(2):
        read = await first.http.get(path, headers={"authorization": f"Bearer {alice}"})
        assert read.status_code == 200, "reads go on"
    assert await exact(first, False)
    server.start()
    for proxy in (first, second):
        await until(partial(exact, proxy))
        turned_away(await Tenants(proxy).open(alice), 429, "quota_exceeded")


async def test_groups_of_two_tenants_never_meet(start: Start) -> None:
    proxy = await start(ADMIN, "server.ranks=1")
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice"), tenants.key("bob")
    await proxy.admit(20)
    for name in ({"group_id": "g"}, {"task_id": "t"}):
        for key in (alice, bob):
            opened = await tenants.open(key, mode="train", group_size=2, **name)
            assert opened.status_code == 200
            assert "/" not in opened.json()["group_id"]
    await proxy.open(group_id="g", group_size=3)
    sizes = {g.id: (len(g.members), g.size) for g in proxy.service.sessions.groups.all()}
    assert sizes["alice/g"] == sizes["bob/g"] == (1, 2)
    assert sizes["g"] == (1, 3)
    assert sorted(id.partition("~")[0] for id in sizes if "~" in id) == ["alice/t", "bob/t"]
    full = await tenants.open(alice, mode="train", group_id="g", group_size=3)
    assert full.json()["error"]["code"] == "group_size_mismatch"
    again = await start(ADMIN, "server.ranks=1")
    assert {g.id: (len(g.members), g.size) for g in again.service.sessions.groups.all()} == sizes
    again_tenants = Tenants(again)
    joined = await again_tenants.open(alice, mode="train", group_id="g", group_size=2)
    assert (joined.status_code, joined.json()["group_id"]) == (200, "g")
    late = await again_tenants.open(alice, mode="train", group_id="g", group_size=2)
    assert late.json()["error"]["code"] == "group_closed"
    assert "alice/" not in late.text
    assert (await again_tenants.open(bob, mode="train", group_id="g", group_size=2)).is_success


async def test_nobody_is_told_of_another_tenants_groups(start: Start) -> None:
    proxy = await start(ADMIN, "server.ranks=1")
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice"), tenants.key("bob")
    await proxy.admit(2)
    await tenants.open(alice, mode="train", group_id="secret-plan", group_size=2)
    turned = await tenants.open(bob, mode="train", group_id="other", group_size=2)
    turned_away(turned, 429, "no_capacity")
    assert "secret-plan" not in turned.text
    own = await tenants.open(alice, mode="train", group_id="more", group_size=2)
    assert "secret-plan has 1 of 2" in own.text


async def test_a_lane_belongs_to_its_tenant_alone(start: Start) -> None:
    proxy = await start(ADMIN, "server.ranks=1")
    tenants = Tenants(proxy)
    alice, bob = tenants.key("alice"), tenants.key("bob")
    session = (await tenants.open(alice)).json()
    key = session["api_key"]
    await proxy.post(f"/rl/v1/sessions/{session['session_id']}/abort", {}, key)
    stolen = await tenants.open(bob, api_key=key)
    forged = await tenants.open(bob, api_key="sk-v1.0.0123456789abcdef01234567." + "0" * 32)
    assert stolen.status_code == forged.status_code == 401
    assert stolen.json() == forged.json()
    assert (await tenants.open(alice, api_key=key)).json()["api_key"] == key
    # The key names the lane's newest session, and with its id an earlier one.
    path, own = f"/rl/v1/sessions/{session['session_id']}", {"authorization": f"Bearer {key}"}
    assert (await proxy.http.get(path, headers=own)).json()["state"] == "aborted"
    # The operator opens it for the tenant whose it is.
    await proxy.post(f"/rl/v1/sessions/{session['session_id']}/abort", {}, key)
    live = list(proxy.service.sessions.live.values())
    assert [s.row.tenant for s in live] == ["alice"]
    await proxy.post(f"/rl/v1/sessions/{live[0].id}/abort", {}, key)
    opened = await proxy.open(mode="eval", api_key=key)
    assert proxy.service.sessions.live[opened["session_id"]].row.tenant == "alice"
    assert proxy.service.sessions.live[opened["session_id"]].row.opened_by == "admin"
