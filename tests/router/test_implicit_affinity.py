"""Model calls of agents that open no sessions go to the home of their conversation."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from any_agent.auth.access import run_dir_of
from any_agent.auth.key_store import create_key
from any_agent.protocol.conversation_key import rank_tag, task_of
from router.affinity import home_of
from router.implicit_affinity import ImplicitAffinity
from tests.router.conftest import StartLab
from tests.support.proxy import until
from tests.support.router import Lab, once_set

PATH = "/v1/chat/completions"
IMPLICIT = ("sessions.implicit=true", "sessions.grader=tests.support.graders.by_length")
ADMIN = "operator-secret-4711"
SYSTEM = {"role": "system", "content": "Be brief."}


def said(k: int, *more: str) -> list[dict[str, Any]]:
    return [SYSTEM, *({"role": "user", "content": text} for text in (f"Task {k}", *more))]


def home(body: dict[str, Any]) -> int:
    return home_of(task_of(body), range(2))


async def ranks_of(lab: Lab, path: str, body: Any, key: str | None = None) -> list[int]:
    """Send it four times; return which ranks got it."""
    for rank in lab.ranks:
        rank.received.clear()
    for _ in range(4):
        assert (await lab.post(path, body, key)).status_code == 200
    return sorted({rank.number for rank in lab.ranks if rank.received})


@pytest.fixture
async def pair(start_lab: StartLab) -> Lab:
    return await start_lab(*IMPLICIT, ranks=2)


async def test_a_conversation_stays_whichever_api_it_comes_by(pair: Lab) -> None:
    homes = set()
    for k in range(8):
        body = {"messages": said(k)}
        homes.add(home(body))
        for path, each in (
            (PATH, body),
            ("/chat/completions", {"messages": said(k, "more", "and more")}),
            ("/openai/deployments/m/chat/completions", body),
            ("/openai/responses", {"instructions": "Be brief.", "input": f"Task {k}"}),
            ("/v1/responses", {"instructions": "Be brief.", "input": f"Task {k}"}),
            ("/v1/messages", {"system": "Be brief.", "messages": said(k)[1:]}),
        ):
            assert await ranks_of(pair, path, each) == [home(body)], (k, path)
    assert homes == {0, 1}


async def test_a_response_names_its_rank(pair: Lab) -> None:
    for rank in (0, 1):
        id = f"resp_{rank_tag(rank)}{'ab' * 14}"
        body = {"input": "more", "previous_response_id": id}
        assert await ranks_of(pair, "/v1/responses", body) == [rank]
        for path in (f"/v1/responses/{id}", f"/responses/{id}/input_items"):
            before = len(pair.ranks[rank].received)
            for _ in range(3):
                assert (await pair.get(path)).status_code == 200
            assert len(pair.ranks[rank].received) == before + 3
    # Of a rank that there is not: the home of the conversation says what is wrong.
    body = {"input": "more", "previous_response_id": f"resp_{rank_tag(9)}abcd"}
    assert await ranks_of(pair, "/v1/responses", body) == [home(body)]


async def test_a_body_that_was_read_for_its_conversation_arrives_as_it_was(pair: Lab) -> None:
    long = {"messages": said(1, "x" * 300_000)}
    assert await ranks_of(pair, PATH, long) == [home(long)]
    rank = pair.ranks[home(long)]
    assert rank.received[0].json == long
    for odd in (b"", b"{", b"[]", b'{"messages": 1}', b'"text"', b"[" * 2000):
        response = await pair.http.post(PATH, content=odd)
        assert response.status_code == 200
    bodies = [r.body for each in pair.ranks for r in each.received]
    assert {b"", b"{", b"[]", b'{"messages": 1}', b'"text"', b"[" * 2000} <= set(bodies)


async def test_only_calls_whose_keys_may_open_sessions_go_to_a_home_rank(
    start_lab: StartLab,
) -> None:
    lab = await start_lab(*IMPLICIT, "server.admin_key=operator-secret-4711", ranks=2)
    key = create_key(run_dir_of(lab.config).keys, "tenant", tenant="alice")[0]
    body = {"messages": said(3)}
    assert await ranks_of(lab, PATH, body, key) == [home(body)]
    # Refused by its head, without a look at its body.
    assert await ranks_of(lab, PATH, body) == [0, 1]


LONG = {"messages": said(4, "x" * 190_000)}


@pytest.fixture
async def tight(start_lab: StartLab) -> Lab:
    """Holds 1.6 MB of bodies, and has an admin key."""
    settings = ("server.max_body_bytes=200000", f"server.admin_key={ADMIN}")
    lab = await start_lab(*IMPLICIT, *settings, ranks=2)
    lab.router.limits.max_bytes = 1_600_000
    return lab


async def test_long_requests_are_bounded_altogether_and_by_key(tight: Lab) -> None:
    go_on = asyncio.Event()
    tight.handle(once_set(go_on))
    asked: list[asyncio.Task[httpx.Response]] = []
    stored = run_dir_of(tight.config).keys
    keys = [create_key(stored, "tenant", tenant=name)[0] for name in ("one", "two", "three")]

    def settled() -> tuple[int, int]:
        forwarded = sum(len(rank.received) for rank in tight.ranks)
        return forwarded, sum(task.done() for task in asked)

    # Of 8 such bodies one key gets 6, whoever else calls.
    asked += [asyncio.create_task(tight.post(PATH, LONG, keys[0])) for _ in range(8)]
    await until(lambda: settled() == (6, 2))
    assert {task.result().status_code for task in asked if task.done()} == {429}
    asked += [asyncio.create_task(tight.post(PATH, LONG, keys[1])) for _ in range(4)]
    await until(lambda: settled() == (8, 4))
    assert (await tight.post(PATH, LONG, keys[2])).status_code == 503
    go_on.set()
    assert [(await task).status_code for task in asked].count(200) == 8
    assert (tight.router.limits.bytes, tight.router.limits.held) == (0, {})
    assert (await tight.post(PATH, LONG, keys[0])).status_code == 200


async def test_a_thread_has_the_body_until_its_end(
    tight: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def read(*_: object) -> int:
        begun.set()
        go_on.wait(30)
        return 0

    monkeypatch.setattr(ImplicitAffinity, "name", read)
    asked = asyncio.create_task(tight.post(PATH, LONG, ADMIN))
    try:
        await until(begun.is_set)
        asked.cancel()
        await asyncio.wait([asked])
        assert (await tight.get("/healthz")).status_code == 200
        assert tight.router.limits.bytes > 190_000
    finally:
        go_on.set()
    await until(lambda: not tight.router.stats.running)
    assert tight.router.limits.bytes == 0
