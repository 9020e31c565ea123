"""The demo's rewards, and its control's: another session's, worth the same at every turn."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import any_agent.demo.driver as driver_module
from any_agent.chat import load_chat_format
from any_agent.demo.driver import GROUP_SIZE, Driver
from any_agent.demo.setups import TINY, Setup
from any_agent.demo.state import Measures, Tally
from any_agent.demo.task import DISCOUNT, ECHO, TaskTurn, items
from any_agent.errors import AgentFailed
from any_agent.record import propagate_rewards
from tests.support.errors import fails_with
from tests.support.journal import make_interaction
from tests.support.proxy import Proxy, config_for, running_proxy
from tests.support.scripted_engine import ScriptedEngine


@pytest.fixture
def driver() -> Driver:
    return Driver("http://nowhere", seed=0, permute=True)


def turns_of(count: int, tokens: int = 2) -> list[TaskTurn]:
    return [TaskTurn(f"turn-{k}", "text", tokens) for k in range(count)]


def returns(given: dict[str, float], turns: int) -> list[float]:
    """What each turn of a chain is worth once rewards have run back through it."""
    nodes = [
        replace(
            make_interaction(f"turn-{k}", "s", f"turn-{k - 1}" if k else None),
            reward=given.get(f"turn-{k}"),
        )
        for k in range(turns)
    ]
    r = propagate_rewards(nodes, discount=DISCOUNT)
    return [r[node.id] for node in nodes]


def test_without_the_control_the_outcome_is_the_last_turns() -> None:
    plain = Driver("http://nowhere", seed=0)
    assert plain.rewards_for(turns_of(2), [False, True]) == {"turn-1": 1.0}
    assert plain.rewards_for(turns_of(1), [False]) == {"turn-0": 0.0}
    assert returns(plain.rewards_for(turns_of(2), [False, True]), 2) == [DISCOUNT, 1.0]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.95, -0.3])
def test_in_the_control_every_turn_is_worth_the_same(
    driver: Driver, count: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a session of one turn would score higher than one of two, right or not."""
    monkeypatch.setattr(driver, "swap", lambda own: value)
    rewards = driver.rewards_for(turns_of(count), [False] * (count - 1) + [True])
    assert returns(rewards, count) == pytest.approx([value] * count)


def test_nobody_gets_its_own_value_back_but_by_the_coin(driver: Driver) -> None:
    """And a value is given out once at most."""
    given = [10.0 + k for k in range(500)]
    got = [driver.swap(value) for value in given]
    tosses = [value for value in got if value in (0.0, 1.0)]
    swapped = [value for value in got if value not in (0.0, 1.0)]
    assert 0 < len(tosses) <= 32
    assert set(got[: len(tosses)]) == {0.0, 1.0}, "the coin is for the first ones, and fair"
    assert len(set(swapped)) == len(swapped)
    assert all(b < a for a, b in zip(given, got, strict=True)), "an earlier session's, always"


def test_a_tally_has_the_means_of_its_sessions() -> None:
    tally = Tally()
    tally.add(turns_of(1, tokens=2), [True])
    tally.add(turns_of(2, tokens=3), [False, True])
    tally.add(turns_of(2, tokens=4), [False, False])
    told = tally.measures()
    assert told == Measures(
        accuracy=pytest.approx(1 / 3),
        reward=pytest.approx((1 + (1 + DISCOUNT) / 2) / 3),
        turns=pytest.approx(5 / 3),
        tokens=pytest.approx(16 / 5),
    )
    assert Tally().measures() == Measures(0.0, 0.0, 0.0, 0.0)


PROMPTS = 3


@pytest.fixture
async def proxy(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Proxy]:
    """A rank whose model babbles."""
    monkeypatch.delenv("ANY_AGENT_URL", raising=False)
    chat = load_chat_format(str(tiny_model_dir), enable_thinking=False)
    engine = ScriptedEngine(decode=chat.decode)
    config = config_for(tmp_path, "sampling.max_new_tokens=4")
    async with engine.serve(), running_proxy(config, chat, engine_url=engine.url) as proxy:
        yield proxy


def few(*, held_out: bool) -> list[Any]:
    return items(held_out=held_out)[:PROMPTS]


FEW = replace(TINY, task=replace(ECHO, items=few))
EVALS = FEW.evals * PROMPTS
RIGHT = replace(TINY, task=replace(FEW.task, is_correct=lambda answer, item: True))


def driver_of(proxy: Proxy, setup: Setup = FEW) -> Driver:
    return Driver(proxy.url, seed=0, setup=setup)


async def test_each_held_out_prompt_is_asked_some_times_and_again_after_a_wrong_answer(
    proxy: Proxy,
) -> None:
    for setup, turns, accuracy in ((RIGHT, EVALS, 1.0), (FEW, 2 * EVALS, 0.0)):
        tally = Tally()
        await driver_of(proxy, setup).evaluate(tally)
        assert (tally.sessions, tally.turns, tally.failed) == (EVALS, turns, 0)
        assert tally.measures().accuracy == accuracy and tally.tokens > 0


class Ending(Tally):
    """Ends the run after two groups, or has every session fail."""

    def __init__(self, proxy: Proxy, fails: bool = False) -> None:
        super().__init__()
        self._proxy = proxy
        self._fails = fails

    def add(self, turns: Any, right: Any) -> None:
        if self._fails:
            raise RuntimeError("the agent broke")
        super().add(turns, right)
        if self.sessions == 2 * GROUP_SIZE:
            self._proxy.service.run.state = "finished"


async def test_groups_are_run_until_the_run_has_finished(
    proxy: Proxy, capfd: pytest.CaptureFixture[str]
) -> None:
    await proxy.admit(1000)
    tally = Ending(proxy)
    await driver_of(proxy, RIGHT).train(tally)
    assert 2 * GROUP_SIZE <= tally.sessions < 3 * GROUP_SIZE
    assert (tally.failed, tally.errors) == (0, [])
    assert "stopped" not in capfd.readouterr().err, "the demo's own display shows the end"


async def test_failures_without_end_end_the_demo(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "MAX_FAILURES", 5)
    await proxy.admit(1000)
    with fails_with(AgentFailed, "the agent broke"):
        await driver_of(proxy).train(Ending(proxy, fails=True))


async def test_a_failure_is_counted_and_the_next_session_goes_on(proxy: Proxy) -> None:
    tally = Ending(proxy, fails=True)
    await driver_of(proxy).evaluate(tally)
    assert (tally.sessions, tally.failed) == (0, EVALS)
    assert tally.errors == ["RuntimeError: the agent broke"] * 5


async def test_the_users_environment_is_as_before_after_a_run(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the service while the agents run."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("ANY_AGENT_URL", raising=False)
    before = dict(os.environ)
    await driver_of(proxy).evaluate(Tally())
    assert dict(os.environ) == before
