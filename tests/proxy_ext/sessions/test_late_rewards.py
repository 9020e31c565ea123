"""Rewards that come late, or never: waiting, deadlines, and what `late_reward` makes of them."""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
from pebble import ProcessPool

from any_agent.config import load_config
from any_agent.errors import ConfigError
from proxy_ext.sessions.grading import Grader, GraderFailed
from tests.proxy_ext.api.test_refusals import refusal
from tests.proxy_ext.test_metrics import scrape
from tests.support.errors import fails_with
from tests.support.proxy import Proxy, until
from tests.support.proxy_fixtures import Start
from tests.support.sessions import awaiting, finalize, info, over

GRADERS = "tests.support.graders"
ROOT = str(Path(__file__).resolve().parents[3])


async def test_a_reward_that_comes_in_time_finalizes_the_awaiting_session(proxy: Proxy) -> None:
    session = await awaiting(proxy, 600)
    key = session["api_key"]
    assert await proxy.lease() == []
    refusal(await proxy.post("/rl/v1/finalize", {}, key), 422, "no_reward")
    refusal(await proxy.call(key), 410, "session_closed")
    assert (await proxy.post("/rl/v1/set_reward", {"reward": 2}, key)).status_code == 200
    ended = await finalize(proxy, session, final_reward={"judge": 1})
    assert (ended["state"], ended["awaits_in"]) == ("finalized", None)
    (trajectory,) = await proxy.lease()
    assert trajectory.final_reward == 1
    assert [i.reward for i in trajectory.interactions] == [2]


async def test_a_session_that_awaits_its_reward_counts_as_buffered(start: Start) -> None:
    """It makes no calls, and its tokens grow old: staleness is bounded by what is buffered."""
    proxy = await start("sessions.reward_deadline=77", admit=10)
    session = await awaiting(proxy)
    assert 70 < (await info(proxy, session))["awaits_in"] <= 77, "the longest one is the default"
    now = await proxy.capacity()
    assert (now["admitted"], now["running"], now["buffered"]) == (1, 0, 1)
    await proxy.open()
    now = await proxy.capacity()
    assert (now["admitted"], now["running"], now["buffered"]) == (2, 1, 1)
    # Without a call there is nothing to wait for.
    empty = await proxy.open()
    response = await proxy.post("/rl/v1/finalize", {"await_reward": True}, empty["api_key"])
    refusal(response, 422, "no_interactions")


async def test_at_the_deadline_what_came_counts_and_nothing_is_rejected(proxy: Proxy) -> None:
    session = await awaiting(proxy, 0.01)
    now = await over(proxy, session)
    assert (now["state"], now["reason"]) == ("rejected", "no reward came by its deadline")
    assert now["rewarded"] is False and now["ended_at"] is not None
    response = await proxy.post("/rl/v1/set_reward", {"reward": 1}, session["api_key"])
    refusal(response, 410, "session_closed")
    session = await awaiting(proxy, 0.5)
    await proxy.post("/rl/v1/set_reward", {"reward": 1}, session["api_key"])
    now = await over(proxy, session)
    assert (now["state"], now["reason"], now["rewarded"]) == ("finalized", None, True)
    assert len(await proxy.lease()) == 1
    await proxy.post("/rl/v1/set_reward", {"final_reward": 1}, (await awaiting(proxy))["api_key"])
    said = await scrape(proxy)
    assert said("any_agent_sessions", mode="train", state="awaiting_reward") == 1
    assert said("any_agent_rewards_total", of="completion") == 1
    assert said("any_agent_rewards_total", of="final") == 1
    for outcome, number in (("rejected", 1), ("rewarded", 1), ("graded", 0)):
        assert said("any_agent_late_rewards_total", outcome=outcome) == number
    assert said("any_agent_sessions_grading") == 0


@pytest.mark.parametrize("policy", ["reject", "zero"])
async def test_a_reward_of_zero_is_said_to_be_the_services(start: Start, policy: str) -> None:
    proxy = await start(f"sessions.late_reward={policy}", admit=10)
    now = await over(proxy, await awaiting(proxy, 0.01, mode="eval"))
    evaluated = ("evaluated", 0.0 if policy == "zero" else None)
    assert (now["state"], now["final_reward"]) == evaluated
    if policy == "zero":
        now = await over(proxy, session := await awaiting(proxy, 0.01))
        assert (now["state"], now["final_reward"]) == ("finalized", 0.0)
        (entry,) = now["reward_history"]
        assert entry["by"] == "sessions.late_reward=zero"
        # Even then a better one may come.
        await proxy.post("/rl/v1/set_reward", {"final_reward": 1}, session["api_key"])
        (trajectory,) = await proxy.lease()
        assert trajectory.final_reward == 1


async def grading_proxy(start: Start, function: str, *settings: str) -> Proxy:
    grader = f"sessions.grader={GRADERS}.{function}"
    return await start("sessions.late_reward=grade", grader, *settings, admit=100)


async def test_a_grader_is_asked_also_after_a_restart(start: Start, proxy: Proxy) -> None:
    earlier = await awaiting(proxy, 0.01)
    proxy = await grading_proxy(start, "by_length")
    assert (await over(proxy, earlier))["final_reward"] == 1
    session = await awaiting(proxy, 0.01, metadata={"plus": 0.5})
    now = await over(proxy, session)
    assert (now["state"], now["final_reward"]) == ("finalized", 1.5)
    (entry,) = now["reward_history"]
    assert entry["by"] == f"grader {GRADERS}.by_length"
    assert proxy.service.expiry.outcomes == {"graded": 2}
    leased = [t.final_reward for _ in range(2) for t in await proxy.lease()]
    assert leased == [1, 1.5]


async def test_a_grader_may_be_async_and_give_names(start: Start) -> None:
    weights = "sessions.reward_weights={correct: 2, format: 1}"
    proxy = await grading_proxy(start, "by_name", weights)
    now = await over(proxy, await awaiting(proxy, 0.01))
    assert now["final_reward"] == 2.5
    assert [entry["name"] for entry in now["reward_history"]] == ["correct", "format"]
    # A name without a weight fails the grade.
    proxy = await grading_proxy(start, "by_name", "sessions.reward_weights={correct: 2}")
    now = await over(proxy, await awaiting(proxy, 0.01))
    assert now["state"] == "rejected" and now["reason"].startswith("grader failed: ")


@pytest.mark.service
async def test_a_grader_that_misbehaves_costs_its_session_alone(
    start: Start, tmp_path: Path
) -> None:
    """Never trained on, the reason says why, and the next one is graded all the same."""
    proxy = await grading_proxy(start, "misbehaves", "sessions.grader_timeout=8")
    pid = tmp_path / "pid"
    cases = ("raises", "hangs", "dies", "exits", "nan", "text", "none", "huge", "names", "odd")
    cases = (*cases, "half a character")
    sessions = {
        how: await awaiting(proxy, 0.01, metadata={"how": how, "pid": str(pid)})
        for how in (*cases, "fine")
    }
    for how in cases:
        now = await over(proxy, sessions[how])
        assert (now["state"], now["rewards_given"]) == ("rejected", 0), (how, now)
        assert now["reason"].startswith("grader failed: "), (how, now)
    now = await over(proxy, sessions["fine"])
    assert (now["state"], now["final_reward"]) == ("finalized", 1)
    assert [t.session_id for t in await proxy.lease(wait=1)] == [sessions["fine"]["session_id"]]
    assert proxy.service.expiry.outcomes == {"grader_failed": len(cases), "graded": 1}
    hung = int(pid.read_text())
    await until(lambda: not Path(f"/proc/{hung}").exists(), "the one that hung is killed")


async def test_a_reward_that_comes_while_it_is_graded_counts(start: Start, tmp_path: Path) -> None:
    proxy = await grading_proxy(start, "misbehaves", "sessions.grader_timeout=30")
    pid = tmp_path / "pid"
    session = await awaiting(proxy, 0.01, metadata={"how": "hangs", "pid": str(pid)})

    async def graded() -> bool:
        await proxy.service.expiry.sweep()
        return pid.exists() and bool(pid.read_text())

    await until(graded, "it is being graded")
    assert proxy.service.expiry.grading == 1
    response = await proxy.post("/rl/v1/finalize", {"final_reward": 7}, session["judge_key"])
    assert response.json()["state"] == "finalized"
    (trajectory,) = await proxy.lease()
    assert trajectory.final_reward == 7
    # What is left of the grader ends with the service.
    await proxy.service.expiry.close()
    await until(lambda: not Path(f"/proc/{pid.read_text()}").exists(), "the worker is gone")


async def test_a_failing_grade_leaves_no_other_grade_hanging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes end with the pool: whoever waits for one of them must hear of it."""
    grader, pid = Grader(f"{GRADERS}.misbehaves", timeout=60), tmp_path / "pid"
    hangs = {"metadata": {"how": "hangs", "pid": str(pid)}}
    hanging = asyncio.create_task(grader.grade(hangs))
    await until(lambda: pid.exists() and pid.read_text(), "it is being graded")

    failed: Future[None] = Future()
    failed.set_exception(RuntimeError("no more processes"))
    with monkeypatch.context() as patch:
        patch.setattr(ProcessPool, "schedule", lambda *_, **__: failed)
        with fails_with(GraderFailed, "processes"):
            await grader.grade(hangs)
    with fails_with(GraderFailed, "ended"):
        await hanging
    try:
        assert (await grader.grade({"metadata": {"how": "fine"}})).final == {None: 1.0}
    finally:
        await grader.close()


async def test_a_missing_grader_fails_its_check() -> None:
    for name in (f"{GRADERS}.missing", "tests.no_such_module.f", f"{GRADERS}.not_callable"):
        grader = Grader(name, timeout=30)
        with pytest.raises(GraderFailed):
            await grader.check()
        await grader.close()


def test_wrong_settings_of_graders_are_refused_by_name() -> None:
    needed = ("sessions.late_reward=grade", "sessions.implicit=true")
    grader = "sessions.grader=a.b"
    for settings, says in (
        *(([setting], "sessions.grader") for setting in needed),
        *(
            ([setting, grader, "sessions.store_content=false"], "store_content")
            for setting in needed
        ),
        (["sessions.grader=nodots"], "module.function"),
        (["sessions.grader=a.b; import os"], "module.function"),
        ([needed[1], grader, "sessions.implicit_group_size=99"], "implicit_group_size"),
        (["sessions.reward_weights={a b: 1}"], "a b"),
        (["sessions.reward_weights={a: .inf}"], "within"),
        (["sessions.reward_weights={a: .nan}"], "within"),
    ):
        with fails_with(ConfigError, says):
            load_config(None, ["rollout.batch_size=8", *settings], {})


@pytest.mark.service
async def test_workers_die_with_their_proxy(tmp_path: Path) -> None:
    """Also one whose grader hangs, and also of a kill -9."""
    script = (
        "import asyncio, sys, os\n"
        "from proxy_ext.sessions.grading import Grader\n"
        "async def main():\n"
        "    g = Grader('tests.support.graders.misbehaves', timeout=60)\n"
        "    await g.grade({'metadata': {'how': 'hangs', 'pid': sys.argv[1]}})\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    pid, path = tmp_path / "pid", tmp_path / "proxy.py"
    path.write_text(script)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(path), str(pid), env={**os.environ, "PYTHONPATH": ROOT}
    )
    try:
        await until(lambda: pid.exists() and pid.read_text(), "the grader hangs")
    finally:
        process.kill()
        await process.wait()
    await until(lambda: not Path(f"/proc/{pid.read_text()}").exists(), "the worker is gone, too")
