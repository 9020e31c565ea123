"""`any-agent sessions tail`: each session once, when its agent has ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

import pytest

from any_agent.cli.tail import Endings, reward_of
from tests.support.proxy import LIMIT, Proxy


async def abort(proxy: Proxy, session: dict[str, str]) -> None:
    path = f"/rl/v1/sessions/{session['session_id']}/abort"
    await proxy.post(path, {"reason": "enough"}, session["api_key"])


async def test_a_sessions_reward_is_the_lists(proxy: Proxy) -> None:
    session = await proxy.open(mode="eval")
    answer = await proxy.complete(session["api_key"])
    assert reward_of(await proxy.client.session_details(session["session_id"])) is None
    for given in ({"interaction_id": answer["id"], "reward": 0.5}, {"final_reward": 0.25}):
        await proxy.post("/rl/v1/set_reward", given, session["api_key"])
        details = await proxy.client.session_details(session["session_id"])
        (line,) = [s async for s in proxy.client.sessions(limit=10)]
        assert reward_of(details) == line.reward is not None
    assert line.reward == 0.75


async def test_each_session_once_when_it_has_ended(proxy: Proxy) -> None:
    await proxy.finished_session()
    going_on = await proxy.open(mode="eval")
    endings = Endings(proxy.client, {})
    await endings.begin()
    assert await endings.look() == []
    done = await proxy.finished_session(reward=0.5, task_id="t", group_size=1)
    (one,) = await endings.look()
    assert (one.session_id, one.state) == (done["session_id"], "finalized")
    assert (one.final_reward, one.interactions, one.output_tokens) == (0.5, 1, 8)
    assert await endings.look() == []
    await abort(proxy, going_on)
    (one,) = await endings.look()
    assert (one.session_id, one.state, one.reason) == (going_on["session_id"], "aborted", "enough")
    late = await proxy.open(mode="eval")
    await proxy.complete(late["api_key"])
    await proxy.post("/rl/v1/finalize", {"await_reward": True}, late["api_key"])
    # It waits for its reward.
    assert await endings.look() == []
    await proxy.post("/rl/v1/set_reward", {"final_reward": 1}, late["api_key"])
    await proxy.post("/rl/v1/finalize", {}, late["api_key"])
    (one,) = await endings.look()
    assert (one.session_id, one.final_reward) == (late["session_id"], 1.0)
    assert await endings.look() == []


async def test_filters_choose(proxy: Proxy) -> None:
    endings = Endings(proxy.client, {"task_id": "wanted"})
    await endings.begin()
    ids = {task: (await proxy.finished_session(task_id=task))["session_id"] for task in
           ("other", "wanted")}  # fmt: skip
    assert [one.session_id for one in await endings.look()] == [ids["wanted"]]


async def test_what_is_deleted_meanwhile_has_no_tokens(proxy: Proxy) -> None:
    session = await proxy.open(mode="eval")
    endings = Endings(proxy.client, {})
    await endings.begin()
    await abort(proxy, session)
    await proxy.http.delete(f"/rl/v1/sessions/{session['session_id']}")
    found = [(one.content, one.output_tokens) for one in await endings.look()]
    assert found == [("deleted", None)]
    assert await endings.look() == []


@pytest.mark.service
async def test_the_command(proxy: Proxy) -> None:
    for extra in ((), ("--json",), ("--state", "finalized", "--min-reward", "0.4")):
        await follow(proxy, *extra)


async def follow(proxy: Proxy, *extra: str) -> None:
    command = ["-m", "any_agent.cli", "sessions", "tail", "--url", proxy.url, "--every", "0.1"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("ANY_AGENT")}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *extra, stdout=pipe, stderr=pipe, env=env
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(LIMIT):
            if "--json" in extra:
                # It says nothing until a session ends: go on until one does after its beginning.
                line = b""
                while not line:
                    await proxy.finished_session(reward=0.25)
                    try:
                        line = await asyncio.wait_for(process.stdout.readline(), 0.5)
                    except TimeoutError:
                        line = b""
                assert json.loads(line)["final_reward"] == 0.25
                assert "reward_history" not in json.loads(line)
            else:
                head = (await process.stdout.readline()).decode().split()
                assert head[:6] == ["ENDED", "STATE", "MODE", "REWARD", "TURNS", "TOKENS"]
                low = await proxy.finished_session(reward=0.25, task_id="low", group_size=1)
                high = await proxy.finished_session(reward=0.75, task_id="high", group_size=1)
                shown = [high] if extra else [low, high]
                lines = [(await process.stdout.readline()).decode().split() for _ in shown]
                assert {line[6] for line in lines} == {one["session_id"] for one in shown}
                assert lines[-1][1:6] in (
                    ["finalized", "train", "0.75", "1", "8"],
                    ["finalized", "train", "0.25", "1", "8"],
                )
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), LIMIT) == 130
        assert await process.stderr.read() == b""
    finally:
        if process.returncode is None:
            process.kill()


async def test_a_service_that_is_away_for_a_moment(proxy: Proxy) -> None:
    session = await proxy.open(mode="eval")
    endings = Endings(proxy.client, {})
    await endings.begin()
    endings.missing.clear()
    # Its rank does not answer: it is not taken for ended.
    sessions = proxy.client.sessions

    def without_ranks(**options: object):  # type: ignore[no-untyped-def]
        options.pop("missing")("0")  # type: ignore[operator]
        return sessions(state="trained")

    proxy.client.sessions = without_ranks  # type: ignore[method-assign]
    assert await endings.look() == [] and endings.missing == {"0"}
    proxy.client.sessions = sessions  # type: ignore[method-assign]
    await abort(proxy, session)
    (one,) = await endings.look()
    assert one.session_id == session["session_id"]
