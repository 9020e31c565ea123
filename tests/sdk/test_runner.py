from __future__ import annotations

import asyncio
import io
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from any_agent import AgentRunner, AgentSession, AnyAgentError
from any_agent.errors import (
    AgentFailed,
    ConfigError,
    DatasetError,
    RunFinished,
    ServiceUnavailable,
    TooManyRequests,
    Unauthenticated,
)
from any_agent.sdk import AsyncSession, RunProgress, RunResults
from any_agent.sdk.runner import ProgressBar, progress_callback
from tests.support.errors import fails_with
from tests.support.sdk.runner import ITEMS, asker, leased, places
from tests.support.sdk_fixtures import Serve, Served


def runner(**settings: Any) -> AgentRunner:
    return AgentRunner(**{"group_size": 2, "concurrency": 4, "progress": False, **settings})


def codes(results: RunResults) -> list[str | None]:
    return [result.code for result in results]


async def test_each_item_is_a_group_of_runs(served: Served, tmp_path: Path) -> None:
    seen: list[RunProgress] = []
    async with asker() as one:

        async def agent(item: dict[str, Any]) -> float:
            await one.ask(item)
            return float(item["question"][4])

        file = tmp_path / "deep" / "results.jsonl"
        ran = runner(results=file, epochs=2, progress=seen.append)
        results = await ran.arun(agent, ITEMS[:3])
    assert [result.place for result in results] == [
        (epoch, item, member) for epoch in range(2) for item in range(3) for member in range(2)
    ]
    assert [result.reward for result in results] == [0, 0, 1, 1, 2, 2] * 2
    assert {result.state for result in results} == {"finalized"}
    assert results.mean == 1.0 and results.rewards == [0, 0, 1, 1, 2, 2] * 2
    assert (results.failed, results.stopped) == ([], None)
    assert str(results.summary()) == "12 runs: 12 ok; mean reward 1"
    assert [r.member for r in results.of_item(1, epoch=1)] == [0, 1]
    trained = places(await leased(served.proxy))
    assert trained == {
        f"{results.run}-{epoch}-{item}": [(epoch, item, 0), (epoch, item, 1)]
        for epoch in range(2)
        for item in range(3)
    }
    assert (seen[-1].done, seen[-1].total, seen[-1].mean) == (12, 12, 1.0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert (lines[0]["any_agent_run"], lines[0]["run"]) == (1, results.run)
    assert sum("state" in line for line in lines) == 12
    assert served.tenant_key not in file.read_text()


ENDS = {
    "raises": "agent_failed",
    "exits": "agent_failed",
    "cancels": "agent_failed",
    "hangs": "agent_timeout",
    "nan": "invalid_reward",
    "text": "invalid_reward",
    "id": "invalid_reward",
    "silent": "no_reward",
    "elsewhere": "no_model_call",
    "no call": "no_model_call",
}
"""What an agent does, and what its run fails with."""


@pytest.mark.service
async def test_failures_cost_their_run_alone(served: Served) -> None:
    calls: dict[str, int] = {}
    async with asker() as one:

        async def agent(item: dict[str, Any]) -> Any:
            what = item["what"]
            calls[what] = calls.get(what, 0) + 1
            if what == "no call":
                return 1.0
            if what == "elsewhere":
                return None
            done = await one.ask(item)
            if what == "raises":
                # Half a character, as names of files and what models write may hold.
                raise ValueError(f"no {done[:2]}\udcff")
            if what == "exits":
                raise SystemExit(3)
            if what == "cancels":
                raise asyncio.CancelledError
            if what == "hangs":
                await asyncio.sleep(60)
            return {"nan": math.nan, "text": "good", "id": {"chatcmpl-0": 1.0}}.get(what)

        items = [{"question": "What?", "what": what} for what in ENDS]
        results = await runner(group_size=1, retries=1, timeout=4.0).arun(agent, items)
    assert dict(zip(ENDS, codes(results), strict=True)) == ENDS
    again = {"raises", "exits", "cancels", "hangs"}
    assert calls == {item["what"]: 2 if item["what"] in again else 1 for item in items}
    assert [r.attempts for r in results] == [calls[item["what"]] for item in items]
    assert results[0].error == "ValueError: no ch?"
    assert "4 s" in str(results[3].error)
    silent = "agent returned None and gave no reward: return a number, or post /rl/v1/set_reward"
    assert str(results[7].error).endswith(silent)
    for result in results:
        assert result.session_id is not None and result.reward is None
        info = await served.info(result.session_id)
        assert info["state"] == "aborted" and info["reason"].startswith(f"{result.code}: ")
    assert results.summary().reasons["agent_failed"] == 3
    assert "10 failed (3 " in str(results.summary())
    assert await leased(served.proxy) == []


async def test_a_failed_run_leaves_its_place_to_the_next_attempt(served: Served) -> None:
    failed: set[int] = set()
    async with asker() as one:

        async def agent(item: dict[str, Any], session: AsyncSession) -> float:
            await one.ask(item)
            number = int(item["question"][4])
            if number not in failed:
                failed.add(number)
                raise OSError("the tool is away")
            return 1.0

        results = await runner(group_size=3).arun(agent, ITEMS)
    assert len(results) == 12 and not results.failed
    assert sorted(result.attempts for result in results) == [1] * 8 + [2] * 4
    trained = places(await leased(served.proxy))
    assert [len(set(members)) for members in trained.values()] == [3] * 4
    assert (await served.proxy.capacity())["reserved"] == 0


async def test_a_runner_told_to_stop_ends_at_the_first_failure(
    served: Served, tmp_path: Path
) -> None:
    file = tmp_path / "r.jsonl"
    async with asker() as one:

        async def agent(item: dict[str, Any]) -> float:
            await one.ask(item)
            if item["question"] == "Say 1.":
                raise ValueError("broken")
            return 1.0

        with fails_with(AgentFailed, "item 1", "epoch 0", "run 0", "ValueError: broken"):
            await runner(
                group_size=1, concurrency=1, retries=0, on_failure="stop", results=file
            ).arun(agent, ITEMS)
        assert len(await leased(served.proxy)) == 1
        # What is done stays done; what was not begun is made now.
        again = runner(group_size=1, concurrency=1, retries=0, results=file)
        results = await again.arun(agent, ITEMS)
    assert [result.ok for result in results] == [True, False, True, True]
    assert one.asked == {f"Say {number}.": 1 for number in range(4)}


async def test_too_many_failures_in_a_row_end_the_run(served: Served) -> None:
    made = 0

    async def agent(item: dict[str, Any]) -> float:
        nonlocal made
        made += 1
        return 1.0

    with fails_with(AgentFailed, "3 runs", "max_failures", "made no call"):
        await runner(group_size=1, concurrency=1, max_failures=3).arun(agent, ITEMS)
    assert made == 3


async def test_a_missing_reward_is_a_given_one_or_awaited_or_a_failure(served: Served) -> None:
    async with asker() as one:
        zero = await runner(missing_reward=0.0).arun(one.run, ITEMS[:1])
        late = await runner(missing_reward="await").arun(one.run, ITEMS[:1])
        none = await runner().arun(one.run, ITEMS[:1])
    assert [(r.state, r.reward) for r in zero] == [("finalized", 0.0)] * 2
    assert [(r.state, r.reward) for r in late] == [("awaiting_reward", None)] * 2
    assert [(r.state, r.code) for r in none] == [("failed", "no_reward")] * 2
    assert len(await leased(served.proxy)) == 2


async def test_evaluations_need_no_slot_and_are_pinned(serve: Serve) -> None:
    served = await serve(slots=0)

    async def agent(item: dict[str, Any], session: AsyncSession) -> float | None:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {session.api_key}"}) as h:
            await h.post(f"{session.base_url}/chat/completions", json=_body(item))
        return 0.25 if item["question"] == "Say 0." else None

    settings = {"mode": "eval", "version": "current", "url": served.url}
    results = await runner(**settings, api_key=served.tenant_key).arun(agent, ITEMS[:2])
    assert [(r.state, r.reward, r.code, r.group_id) for r in results] == [
        *[("evaluated", 0.25, None, None)] * 2,
        *[("failed", None, "no_reward", None)] * 2,
    ]
    assert results[0].version == 0


async def test_no_slot_for_too_long_ends_the_run(serve: Serve) -> None:
    served = await serve(slots=0)
    with fails_with(TooManyRequests, "slot", code="no_capacity"):
        await runner(url=served.url, api_key=served.tenant_key, wait=0.2).arun(_never, ITEMS)


async def test_what_the_service_refuses_to_all_ends_the_run(served: Served) -> None:
    with pytest.raises(Unauthenticated):
        await runner(api_key="wrong").arun(_never, ITEMS)
    with fails_with(ServiceUnavailable, "http://127.0.0.1:9"):
        await runner(url="http://127.0.0.1:9", retry_for=0.1).arun(_never, ITEMS)
    with fails_with(AnyAgentError, "100", param="group_size", status=400):
        await runner(group_size=100).arun(_never, ITEMS)


async def test_training_that_has_finished_ends_the_run(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r.jsonl"
    async with asker() as one:

        async def agent(item: dict[str, Any]) -> float:
            await one.ask(item)
            if item["question"] == "Say 1.":
                await served.proxy.client.set_run("finished", step=1, checkpoint=None)
            return 1.0

        settings = {"group_size": 1, "concurrency": 1, "results": file}
        for _ in range(2):
            results = await runner(**settings).arun(agent, ITEMS)
            assert len(results) == 2 and not results.failed
            assert "training has ended" in str(results.stopped)
            assert "stopped after 2 of 4 runs: training has ended" in capsys.readouterr().err
    assert one.asked.total() == 2


@pytest.mark.parametrize("state", ["finished", "serving"])
async def test_a_service_that_trains_no_more_is_named_to_a_training_run(
    served: Served, state: Any
) -> None:
    served.proxy.service.run.state = state
    with fails_with(RunFinished, "mode=eval", code="run_finished") as refused:
        await runner().arun(lambda item: 1.0, ITEMS)
    assert refused.value.__notes__ == ["0 of 8 runs are done"]
    async with AgentSession(mode="eval"):
        pass


def test_wrong_settings_are_refused_by_name() -> None:
    wrong: dict[str, Any] = {"concurrency": 0, "group_size": 0, "epochs": 0, "retries": -1}
    wrong |= {"timeout": 0, "max_failures": 0, "on_failure": "shrug", "mode": "test"}
    wrong |= {"missing_reward": "zero"}
    for name, value in wrong.items():
        with fails_with(ConfigError, name):
            AgentRunner(**{"url": "http://127.0.0.1:9", name: value})
    with fails_with(ConfigError, "one session"):
        AgentRunner(url="http://127.0.0.1:9", api_key="sk-v1.0.a.b")
    with fails_with(ConfigError, "localhost:8000"):
        AgentRunner(url="localhost:8000")


async def test_datasets_without_items_are_refused(served: Served, tmp_path: Path) -> None:
    broken = tmp_path / "items.jsonl"
    broken.write_text('{"question": "a"}\n\n{"question": \n')
    with fails_with(DatasetError, broken, "line 3"):
        await runner().arun(_never, broken)
    for data, named in (
        ([], "empty"),
        (tmp_path / "none.jsonl", "none.jsonl"),
        ({"a": 1}, "dict"),
        (7, "a int"),
        (iter(()), "empty"),
    ):
        with fails_with(DatasetError, named):
            await runner().arun(_never, data)


def test_run_blocks_where_no_event_loop_runs() -> None:
    one = AgentRunner(url="http://127.0.0.1:9", retry_for=0.1, progress=False)
    with pytest.raises(ServiceUnavailable):
        one.run(_never, ITEMS)

    async def inside() -> None:
        await one.run(_never, ITEMS)

    with pytest.raises(ServiceUnavailable):
        asyncio.run(inside())


async def _never(item: dict[str, Any]) -> float:
    raise AssertionError("no agent is run")


def _body(item: dict[str, Any]) -> dict[str, Any]:
    messages = [{"role": "user", "content": item["question"]}]
    return {"model": "gpt-4o", "messages": messages, "max_tokens": 4}


def test_a_bar_is_one_line_that_is_drawn_over_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    bar = ProgressBar(stream)
    state = RunProgress(total=4)
    bar(state)
    state.done, state.running, state.rewarded, state.rewards = 4, 2, 3, 1.5
    state.failed = 1
    bar(state)
    bar.end()
    bar.end()
    first, second, third = stream.getvalue().split("\r")
    assert first == ""
    assert second.startswith("." * 24 + " 0/4 runs | 0 running | ")
    assert third.startswith("#" * 24 + " 4/4 runs | 2 running | ")
    assert third.endswith("/s | 1 failed | mean reward 0.500\n")
    state, stream = RunProgress(total=1000), io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: state.done * 0.01)
    bar = ProgressBar(stream)
    for done in range(100):
        state.done = done
        bar(state)
    assert stream.getvalue().count("\r") == 5


def test_progress_goes_to_a_callback_or_to_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[RunProgress] = []
    state = RunProgress(total=1)
    progress_callback(told.append)(state)
    assert told == [state]
    assert isinstance(progress_callback(True), ProgressBar)
    progress_callback(False)(state)
    for terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        assert isinstance(progress_callback(None), ProgressBar) is terminal
