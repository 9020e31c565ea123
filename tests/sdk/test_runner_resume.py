"""A runner that is killed, stopped, or loses what it wrote, and the one that goes on."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from any_agent import AgentRunner
from any_agent.errors import ConfigError
from any_agent.sdk import AsyncSession
from any_agent.sdk.run_plan import fingerprint, items_of
from tests.support.errors import fails_with
from tests.support.proxy import until
from tests.support.sdk.runner import ITEMS, asker, leased, places
from tests.support.sdk.runner_killed import GROUP
from tests.support.sdk_fixtures import Served

pytestmark = pytest.mark.service


def runner(file: Path, **settings: Any) -> AgentRunner:
    return AgentRunner(
        **{"group_size": 2, "concurrency": 4, "progress": False, "results": file, **settings}
    )


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def without(file: Path, *fields: str) -> None:
    """Drop the lines that have one of these fields, as if they had never been written."""
    kept = [line for line in lines_of(file) if not line.keys() & {*fields}]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in kept))


def results_in(file: Path) -> int:
    if not file.exists():
        return 0
    return file.read_text().count('"state"')


async def test_no_run_is_missing_and_none_is_twice(
    served: Served, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Killed again and again, at no particular moment."""
    file, items = tmp_path / "r.jsonl", 40 if pytestconfig.getoption("--long") else 8
    command = [sys.executable, "-m", "tests.support.sdk.runner_killed", str(file), str(items)]
    kills = 0
    while True:
        process = await asyncio.create_subprocess_exec(*command)
        ended = asyncio.create_task(process.wait())
        more = results_in(file) + 4 + kills % 3
        await _until_there(file, more, ended)
        if ended.done():
            assert await ended == 0
            break
        process.kill()
        await ended
        kills += 1
    assert kills >= 3
    trajectories = await leased(served.proxy)
    trained = places(trajectories)
    run = lines_of(file)[0]["run"]
    assert trained == {
        f"{run}-0-{item}": [(0, item, member) for member in range(GROUP)] for item in range(items)
    }
    for one in trajectories:
        # No call of a run that was killed is in the session that was trained on.
        assert len(one.interactions) == 2
        assert one.interactions[-1].reward == one.metadata["item"]
    now = await served.proxy.capacity()
    assert (now["running"], now["reserved"], now["buffered"]) == (0, 0, items * GROUP)


async def _until_there(file: Path, results: int, ended: asyncio.Task[int]) -> None:
    await until(lambda: ended.done() or results_in(file) >= results, f"{results} results")


async def test_a_run_that_was_finalized_and_not_written_down_is_not_repeated(
    served: Served, tmp_path: Path
) -> None:
    file = tmp_path / "r.jsonl"
    async with asker(0.5) as one:
        first = await runner(file).arun(one.run, ITEMS)
        # Killed before the results were written; then also before it was known what was open.
        for lost in (["state"], ["state", "opened"]):
            asked = one.asked.total()
            without(file, *lost)
            again = await runner(file).arun(one.run, ITEMS)
            assert {r.session_id: r.reward for r in again} == {r.session_id: 0.5 for r in first}
            # Whoever does not know that a session is over finds out by its first call.
            assert one.asked.total() - asked == (0 if len(lost) == 1 else len(ITEMS) * 2)
    assert [len(members) for members in places(await leased(served.proxy)).values()] == [2] * 4


async def test_sessions_that_a_killed_runner_had_just_opened_are_taken_up(
    served: Served, tmp_path: Path
) -> None:
    """It was killed while it opened them. They are taken up, if they are what would be opened now;
    else they are left to expire."""
    file = tmp_path / "r.jsonl"
    async with asker(1.0) as one:
        await runner(file, group_size=1).arun(one.run, ITEMS[:1])
        known = await runner(file, group_size=1).arun(one.run, ITEMS[:1])
        header = lines_of(file)[0]
        file.write_text(
            json.dumps({**header, "items": 2, "data": fingerprint(items_of(ITEMS[:2]))})
        )
        with file.open("a") as rest:
            rest.write(f"\n{json.dumps(known[0].as_dict())}\n")
        key = f"{known.run}-0-1-0-0-open"
        fields = {"task_id": "t", "group_id": f"{known.run}-0-1", "group_size": 1}
        other = await served.proxy.http.post(
            "/rl/v1/start_session",
            json={**fields, "ttl": 60},
            headers={"idempotency-key": key, "authorization": f"Bearer {served.tenant_key}"},
        )
        assert other.status_code == 200, other.text
        results = await runner(file, group_size=1).arun(one.run, ITEMS[:2])
    assert [result.ok for result in results] == [True, True]
    assert results[1].group_id == f"{known.run}-0-1.1"
    assert results[1].session_id != other.json()["session_id"]
    assert len(await leased(served.proxy)) == 2


async def test_runs_whose_group_went_on_without_them_make_another(
    served: Served, tmp_path: Path
) -> None:
    """The next runner comes when their group's time is over: they make another one."""
    file = tmp_path / "r.jsonl"
    async with asker() as one:
        begun, hold = 0, True

        async def agent(item: dict[str, Any], session: AsyncSession) -> float:
            nonlocal begun
            begun += 1
            held = hold and begun > 3
            await one.ask(item)
            if held:
                await asyncio.sleep(60)
            return 1.0

        running = asyncio.create_task(
            runner(file, group_size=5, concurrency=5).arun(agent, ITEMS[:1])
        )
        await until(lambda: results_in(file) == 3)
        running.cancel()
        await asyncio.wait([running])
        (group,) = served.proxy.service.sessions.groups.all()
        group.deadline = 0.0
        await until(lambda: group.expired)
        hold = False
        for _ in range(2):
            results = await runner(file, group_size=5, concurrency=5).arun(agent, ITEMS[:1])
            assert len(results) == 5 and not results.failed
            assert begun == 7
    trained = places(await leased(served.proxy))
    assert [len(members) for _, members in sorted(trained.items())] == [3, 2]
    assert sorted(trained)[1] == f"{results.run}-0-0.1"
    assert sorted(chain(*trained.values())) == [(0, 0, member) for member in range(5)]


async def test_another_runs_file_is_refused(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    async with asker(1.0) as one:
        await runner(file).arun(one.run, ITEMS[:2])
        before = file.read_text()
        for settings, data, difference in (
            ({}, ITEMS[:3], "2 items, not 3"),
            ({}, [*ITEMS[:1], {"question": "Say what?"}], "another dataset"),
            ({"group_size": 3}, ITEMS[:2], "group_size 2, not 3"),
            ({"mode": "eval"}, ITEMS[:2], "mode train, not eval"),
        ):
            with fails_with(ConfigError, file, difference):
                await runner(file, **settings).arun(one.run, data)
        assert file.read_text() == before
        # More epochs of the same are the same run.
        results = await runner(file, epochs=2).arun(one.run, ITEMS[:2])
    assert len(results) == 8
