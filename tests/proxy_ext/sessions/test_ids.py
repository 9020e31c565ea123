"""Ids and sampling seeds: random, or the same whenever the run's seed and the opens are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from any_agent.auth.access import ANYONE
from any_agent.chat import ChatFormat
from any_agent.errors import StoreUnavailable
from any_agent.keys import rank_of_session, tag_of_session
from any_agent.protocol.rl import StartSession
from proxy_ext.sessions.ids import SessionIds
from tests.support.proxy import Proxy, config_for, running_proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sessions import unwritable

DETERMINISTIC = ("rollout.deterministic=true", "train.seed=7")


def test_session_ids_follow_from_the_seed() -> None:
    def some(rank: int, seed: int) -> list[Any]:
        names = SessionIds(rank, seed)
        sessions = [names.new_session() for _ in range(3)]
        sessions += [names.new_member(group, number) for group in ("g", "h") for number in range(3)]
        return [*sessions, *(names.sampling_seed(sessions[0], number) for number in range(3))]

    assert some(1, 7) == some(1, 7)
    everything = [item for rank in (0, 1) for seed in (7, 8) for item in some(rank, seed)]
    assert len(set(everything)) == len(everything)
    assert [rank_of_session(id) for id in some(1, 7)[:9]] == [1] * 9
    assert all(0 <= seed < 2**31 for seed in some(1, 7)[9:])


def test_ids_of_generations_of_one_moment_differ() -> None:
    names = SessionIds(0, 7)
    taken: list[str] = []
    for _ in range(3):
        taken.append(names.new_generation("t", taken))
    assert len(set(taken)) == 3
    again = SessionIds(0, 7)
    # What nobody got into does not count; what somebody did is used once.
    assert again.new_generation("t", ()) == again.new_generation("t", ()) == taken[0]
    again.new_member(taken[0], 0)
    assert again.new_generation("t", ()) == taken[1]


def test_without_a_seed_session_ids_are_random() -> None:
    one, other = SessionIds(0), SessionIds(0)
    assert one.new_session() != other.new_session()
    assert one.new_member("g", 0) != other.new_member("g", 0)
    assert one.new_generation("t", ()) != other.new_generation("t", ())
    assert one.sampling_seed("s", 0) is None


def test_a_tag_is_read_in_each_id_and_changes_nothing_that_is_sampled() -> None:
    tag = "0badc0de"
    for seed in (None, 7):
        plain, tagged = SessionIds(1, seed), SessionIds(1, seed, tag)
        for make in (lambda ids: ids.new_session(), lambda ids: ids.new_member("g", 2)):
            id, other = make(tagged), make(plain)
            assert (tag_of_session(id), tag_of_session(other)) == (tag, None)
            assert rank_of_session(id) == rank_of_session(other) == 1
            # As many random digits as without.
            assert len(id) == len(other) + len(tag)
            if seed is not None:
                assert id.replace(tag, "", 1) == other
                assert tagged.sampling_seed(id, 3) == plain.sampling_seed(other, 3)


async def crowd(root: Path, chat: ChatFormat, order: list[int]) -> dict[str, set[str]]:
    """Openers of three tasks at once, in some order; the sessions' ids by their groups."""
    engine = ScriptedEngine(decode=chat.decode)
    async with engine.serve():
        config = config_for(root, *DETERMINISTIC)
        async with running_proxy(config, chat, engine_url=engine.url) as proxy:
            opening = [
                asyncio.create_task(proxy.open(task_id=f"t{k % 3}", group_size=2, wait=30))
                for k in order
            ]
            # One does not wait for long enough.
            hasty = {"task_id": "t0", "group_size": 2, "wait": 0}
            assert (await proxy.http.post("/rl/v1/start_session", json=hasty)).status_code == 429
            await proxy.admit(100)
            groups: dict[str, set[str]] = {}
            for session in await asyncio.gather(*opening):
                groups.setdefault(session["group_id"], set()).add(session["session_id"])
    return groups


async def test_openers_of_other_groups_change_no_ids(tmp_path: Path, chat: ChatFormat) -> None:
    order = list(range(12))
    groups = await crowd(tmp_path / "a", chat, order)
    assert [len(ids) for ids in groups.values()] == [2] * 6
    assert groups == await crowd(tmp_path / "b", chat, order[::-1])
    assert groups == await crowd(tmp_path / "c", chat, [*order[6:], *order[:6]])


@pytest.mark.parametrize("fields", [{}, {"task_id": "t"}, {"group_id": "g"}], ids=repr)
async def test_an_id_that_the_journal_never_got_is_not_given_twice(
    start: Start, fields: dict[str, Any]
) -> None:
    """However many openings failed."""
    fields = fields | {"group_size": 8} if fields else fields

    async def begin() -> Proxy:
        more = ("rollout.batch_size=8", "rollout.max_concurrent=8")
        return await start(*DETERMINISTIC, *more, admit=100)

    async def fail(proxy: Proxy, times: int) -> None:
        with unwritable(proxy.service.journal):
            for _ in range(times):
                with pytest.raises(StoreUnavailable):
                    await proxy.service.opening.open(StartSession(**fields), ANYONE)

    proxy = await begin()
    opened = set()
    for times in (1, 1100, 0):
        await fail(proxy, times)
        opened.add((await proxy.open(**fields))["session_id"])
    await proxy.service.journal.close()
    again = await begin()
    await fail(again, 1100)  # as often as before: what comes next was there already
    opened |= {(await again.open(**fields))["session_id"] for _ in range(4)}
    assert len(opened) == len(again.service.sessions.live) == 7


async def test_no_two_calls_have_the_same_seed_though_one_of_them_ends_unrecorded(
    start: Start, engine: ScriptedEngine
) -> None:
    """The next one must not be a clone of the one that was recorded meanwhile."""
    proxy = await start(*DETERMINISTIC, admit=1)
    session = await proxy.open()
    engine.hold(3)
    left = asyncio.create_task(proxy.complete(session["api_key"]))
    await until(lambda: engine.requests)
    await asyncio.gather(*(proxy.complete(session["api_key"]) for _ in range(3)))
    left.cancel()
    await until(lambda: not proxy.service.sessions.live[session["session_id"]].calls)
    await proxy.complete(session["api_key"])
    seeds = [r["sampling_params"]["sampling_seed"] for r in engine.requests]
    recorded = [i.gconfig.seed for i in await proxy.recorded(session["session_id"])]
    assert len(set(seeds)) == 5 and sorted(recorded) == sorted(seeds[1:])
