"""Sessions whose trees are in the journal alone, and read again when they are wanted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from any_agent.errors import StoreUnavailable
from any_agent.keys import Lane
from any_agent.types import Interaction
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.tree_cache import TreeCache
from tests.support.errors import fails_with
from tests.support.proxy import HELLO, Proxy, signer, until
from tests.support.proxy_fixtures import Start
from tests.support.retries import text_of
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import abort, finalize, played

COLD = "sessions.hot_bytes=0"
"""Whatever is not in use is let go."""


def plain(interactions: Sequence[Interaction]) -> list[Any]:
    """Interactions without what is another one in every run: ids and times."""
    places = {i.id: place for place, i in enumerate(interactions)}
    return [
        (
            places.get(i.parent_id or ""),
            i.prompt_delta_ids.tobytes(),
            i.output_ids.tobytes(),
            i.output_logprobs.tobytes(),
            i.output_versions.tobytes(),
            i.message_delta,
            i.output_message,
            i.continuation,
            i.branch_reason,
            i.untrainable_reason,
            i.reward,
        )
        for i in interactions
    ]


async def walk(proxy: Proxy, engine: ScriptedEngine, seed: int) -> tuple[list[Any], list[Any]]:
    """Some sessions in turns, each a tree: the engine's prompts, and what the trainer is handed."""
    rng, trees = random.Random(seed), proxy.service.sessions.trees
    engine.requests.clear()
    opened = [await proxy.open() for _ in range(4)]
    talks: dict[str, list[list[dict[str, Any]]]] = {s["api_key"]: [list(HELLO)] for s in opened}
    completions: dict[str, list[str]] = {key: [] for key in talks}
    for turn in range(30):
        # Nobody is at work now, so with COLD nothing stays.
        trees.trim()
        key = opened[turn % 4]["api_key"] if turn < 4 else rng.choice(list(talks))
        messages = rng.choice(talks[key][-4:])
        if rng.random() < 0.3:
            events, _ = await proxy.stream(key, messages)
            id, text = events[0]["id"], text_of(events)
        else:
            told = await proxy.complete(key, messages)
            id, text = told["id"], told["choices"][0]["message"]["content"]
        completions[key].append(id)
        said = {"role": "user", "content": f"go on {turn}"}
        talks[key].append([*messages, {"role": "assistant", "content": text}, said])
        trees.trim()
        if rng.random() < 0.4:
            named = {"completion_id": rng.choice(completions[key])} if rng.random() < 0.5 else {}
            reward = {"reward": rng.random(), **named}
            assert (await proxy.post("/rl/v1/set_reward", reward, key)).status_code == 200
    for session in opened:
        trees.trim()
        ended = await finalize(proxy, session, final_reward=rng.random())
        assert ended["interactions"] == len(completions[session["api_key"]])
    trees.trim()
    leased = [trajectory for _ in opened for trajectory in await proxy.lease(wait=60)]
    order = [session["session_id"] for session in opened]
    leased.sort(key=lambda t: order.index(t.session_id))
    prompts = [request["input_ids"] for request in engine.requests]
    return prompts, [(plain(t.interactions), t.final_reward) for t in leased]


@pytest.mark.parametrize("seed", range(2))
async def test_a_session_read_back_from_the_journal_behaves_the_same(
    start: Start, engine: ScriptedEngine, tmp_path: Any, seed: int
) -> None:
    warm = await start(f"root={tmp_path / 'warm'}", admit=100)
    cold = await start(f"root={tmp_path / 'cold'}", COLD, admit=100)
    assert await walk(cold, engine, seed) == await walk(warm, engine, seed)
    assert cold.service.sessions.trees.reads > 20
    assert warm.service.sessions.trees.reads == 0


async def test_a_start_reads_no_tree_and_a_list_neither(start: Start) -> None:
    first = await start(admit=100)
    session = [await played(first) for _ in range(3)][-1]
    # As after a kill: the first one has written everything that it acknowledged.
    proxy = await start()
    trees = proxy.service.sessions.trees
    listed = (await proxy.http.get("/rl/v1/sessions")).json()
    assert session["session_id"] in str(listed)
    assert (len(trees), trees.reads) == (0, 0)
    answer = await proxy.complete(session["api_key"])
    assert trees.reads == 1
    response = await proxy.post("/rl/v1/set_reward", {"reward": 1}, session["api_key"])
    assert response.json()["interaction_id"] == answer["id"]
    assert trees.reads == 1


async def one(proxy: Proxy) -> tuple[RecordedSession, TreeCache]:
    """A session with a call, let go."""
    opened = await played(proxy)
    session = proxy.service.sessions.live[opened["session_id"]]
    await until(lambda: not session.calls)
    trees = proxy.service.sessions.trees
    trees.trim()
    assert not session.loaded
    with fails_with(RuntimeError, "loaded"):
        len(session.tree)  # it is not an empty one
    return session, trees


@pytest.fixture
async def cold(start: Start) -> Proxy:
    return await start(COLD, admit=100)


async def test_simultaneous_readers_of_a_tree_share_one_reading(
    cold: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, trees = await one(cold)
    read, reads, go = cold.service.journal.interactions, 0, asyncio.Event()

    async def held(session_id: str) -> Any:
        nonlocal reads
        reads += 1
        await go.wait()
        if reads == 1:
            raise StoreUnavailable("it burns", retry_after=1)
        return await read(session_id)

    monkeypatch.setattr(cold.service.journal, "interactions", held)
    for fails in (True, False):
        go.clear()
        waiting = [asyncio.create_task(trees.load(session)) for _ in range(5)]
        await until(lambda fails=fails: reads == (1 if fails else 2))
        # One that leaves takes it from nobody.
        waiting[0].cancel()
        go.set()
        found = await asyncio.gather(*waiting[1:], return_exceptions=True)
        assert [type(each) for each in found] == [StoreUnavailable if fails else type(None)] * 4
        assert session.loaded is not fails
    assert (reads, len(session.tree)) == (2, 1)


async def test_a_tree_in_use_is_not_evicted(cold: Proxy, engine: ScriptedEngine) -> None:
    session, trees = await one(cold)
    await trees.load(session)
    async with session.lock:
        trees.trim()
        assert session.loaded
    with trees.pinned(session):
        trees.trim()
        assert session.loaded
    release = engine.hold(at=1)
    call = asyncio.create_task(cold.complete(signer(cold).key_of(Lane(0, session.row.lane))))
    await until(lambda: session.calls)
    trees.trim()
    assert session.loaded
    release.set()
    await call
    await until(lambda: not session.calls)
    trees.trim()
    assert not session.loaded
    assert trees.bytes == len(trees) == 0


async def test_the_least_recently_wanted_tree_is_evicted_first(start: Start) -> None:
    proxy = await start(admit=100)
    trees = proxy.service.sessions.trees
    opened = [await played(proxy) for _ in range(3)]
    first, second, third = (proxy.service.sessions.live[s["session_id"]] for s in opened)
    await until(lambda: not any(s.calls for s in (first, second, third)))
    each = trees.bytes // 3
    await trees.load(first)
    trees.budget = trees.bytes - 1
    trees.trim()
    assert [s.loaded for s in (first, second, third)] == [True, False, True]
    assert trees.bytes <= trees.budget
    # Ended ones count no more.
    await abort(proxy, opened[2])
    assert trees.bytes < 2 * each
    assert len(trees) == 1


async def test_the_budget_counts_what_was_told_of_the_likeliest_tokens(proxy: Proxy) -> None:
    """They take several times as much as everything else."""
    sizes = []
    for fields in ({}, {"logprobs": True, "top_logprobs": 20}):
        session = await proxy.open()
        before = proxy.service.sessions.trees.bytes
        await proxy.complete(session["api_key"], max_tokens=500, **fields)
        sizes.append(proxy.service.sessions.trees.bytes - before)
    assert sizes[1] - sizes[0] > 500 * 20 * 8
