"""The end of a router: what is under way ends, and nothing new begins."""

from __future__ import annotations

import asyncio

from any_agent.rundir.registry import Registry
from tests.support.proxy import until
from tests.support.router import END, Lab, Received, never, refusal, refuses, says


async def test_a_stream_under_way_arrives_whole_and_nothing_new_begins(lab: Lab) -> None:
    go = asyncio.Event()

    async def answer(received: Received) -> None:
        await received.begin()
        await received.chunk(b"data: 1\n\n")
        await go.wait()
        await received.chunk(b"data: 2\n\n")
        await received.send(END)

    lab.ranks[0].handler = answer
    wire = await lab.raw("POST /v1/x", body=b"{}")
    await wire.head()
    drained = asyncio.create_task(lab.router.drain(30))
    await until(lambda: lab.router.draining)
    for path in ("/v1/chat/completions", "/rl/v1/start_session"):
        refused = await lab.post(path, {}, lab.key(0))
        assert refusal(refused) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
    assert (await lab.get("/healthz")).status_code == 200
    assert not drained.done()
    go.set()
    await drained
    got = await wire.take(33)
    assert got == b"9\r\ndata: 1\n\n\r\n" + b"9\r\ndata: 2\n\n\r\n" + END
    # What came meanwhile never reached a rank.
    assert len(lab.ranks[0].received) == 1


async def test_a_draining_router_says_that_it_stops(lab: Lab) -> None:
    def state() -> str | None:
        registry = Registry(lab.registry)
        registry.refresh()
        entry = registry.get("router")
        return entry.state if entry else None

    await until(lambda: state() == "ready")
    await lab.router.drain(30)
    await until(lambda: state() == "stopping")


async def test_an_answer_that_never_ends_is_awaited_only_until_the_deadline(lab: Lab) -> None:
    lab.ranks[0].handler = never
    _wire = await lab.raw("POST /v1/x", body=b"{}")
    await until(lambda: lab.ranks[0].received)
    await lab.router.drain(0.05)
    assert lab.router.stats.running == 1


async def test_a_drain_ends_the_wait_of_requests_for_a_rank(lab: Lab) -> None:
    await lab.ranks[0].kill()
    call = asyncio.create_task(lab.post("/v1/chat/completions", {}, lab.key(0)))
    await until(lambda: lab.router.ranks.waiting)
    await lab.router.drain(30)
    refused = await call
    assert refused.status_code == 503
    assert "retry-after" in refused.headers


async def test_a_draining_rank_is_passed_over_for_an_open(pair: Lab) -> None:
    """It may not have been heard of yet that it stops."""
    pair.handle(refuses("draining", 503, {"retry-after": "5"}), says({"session_id": "s"}))
    for _ in range(4):
        assert (await pair.post("/rl/v1/start_session", {})).json() == {"session_id": "s"}
