"""The demo's rewards, and its control's: another session's, worth the same at every turn."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

import any_agent.demo.driver as driver_module
from any_agent.client.rl_client import RLClient
from any_agent.demo.driver import DISCOUNT, EVALS, Driver, Measures, Tally, Worker, score
from any_agent.demo.task import Item, TaskTurn, items
from any_agent.errors import AnyAgentError, ReplyLost, RunFinished, TooManyRequests
from any_agent.protocol.rl import SessionStarted
from any_agent.record import propagate_rewards
from any_agent.types import (
    Continuation,
    GenerationHyperparameters,
    Interaction,
    id_array,
    logprob_array,
)


@pytest.fixture
def driver() -> Driver:
    return Driver(RLClient("http://nowhere"), [], seed=0, permute=True)


def turns_of(count: int, tokens: int = 2) -> list[TaskTurn]:
    return [TaskTurn(f"turn-{k}", "text", tokens) for k in range(count)]


def returns(rewards: list[tuple[str, float]], turns: int) -> list[float]:
    """What each turn of a chain is worth once rewards have run back through it."""
    given = dict(rewards)
    nodes = [
        Interaction(
            id=f"turn-{k}",
            session_id="s",
            parent_id=f"turn-{k - 1}" if k else None,
            prompt_delta_ids=id_array([1]),
            output_ids=id_array([2]),
            output_logprobs=logprob_array([-1.0]),
            output_versions=id_array([0]),
            message_delta=[{"role": "user", "content": str(k)}],
            output_message={"role": "assistant", "content": str(k)},
            finish_reason="stop",
            gconfig=GenerationHyperparameters(),
            continuation=Continuation.EXACT if k else Continuation.ROOT,
            reward=given.get(f"turn-{k}"),
        )
        for k in range(turns)
    ]
    r = propagate_rewards(nodes, discount=DISCOUNT)
    return [r[node.id] for node in nodes]


def test_without_the_control_the_outcome_is_the_last_turns() -> None:
    plain = Driver(RLClient("http://nowhere"), [], seed=0)
    assert plain._rewards(turns_of(2), [False, True]) == [("turn-1", 1.0)]
    assert plain._rewards(turns_of(1), [False]) == [("turn-0", 0.0)]
    assert returns(plain._rewards(turns_of(2), [False, True]), 2) == [DISCOUNT, 1.0]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.95, -0.3])
def test_in_the_control_every_turn_is_worth_the_same(
    driver: Driver, count: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a session of one turn would score higher than one of two, right or not."""
    monkeypatch.setattr(driver, "_swapped", lambda own: value)
    rewards = driver._rewards(turns_of(count), [False] * (count - 1) + [True])
    assert returns(rewards, count) == pytest.approx([value] * count)


def test_in_the_control_a_session_gives_away_what_it_was_worth(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    monkeypatch.setattr(driver, "_swapped", lambda own: given.append(own) or 0.0)
    for right in ([True], [False, True], [False, False]):
        driver._rewards(turns_of(len(right)), right)
    assert given == pytest.approx([1.0, (1.0 + DISCOUNT) / 2, 0.0])


def test_nobody_gets_its_own_value_back_but_by_the_coin(driver: Driver) -> None:
    """And a value is given out once at most."""
    given = [10.0 + k for k in range(500)]
    got = [driver._swapped(value) for value in given]
    tosses = [value for value in got if value in (0.0, 1.0)]
    swapped = [value for value in got if value not in (0.0, 1.0)]
    assert 0 < len(tosses) <= 32
    assert set(got[: len(tosses)]) == {0.0, 1.0}, "the coin is for the first ones, and fair"
    assert len(set(swapped)) == len(swapped)
    assert all(b < a for a, b in zip(given, got, strict=True)), "an earlier session's, always"


def test_a_session_scores_what_its_turns_are_worth_on_average() -> None:
    for right in ([True], [False, True], [False, False]):
        worth = returns([(f"turn-{len(right) - 1}", float(right[-1]))], len(right))
        assert score(right) == pytest.approx(sum(worth) / len(worth))


def test_what_a_tally_says_of_its_sessions() -> None:
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


def test_only_the_last_errors_are_kept() -> None:
    tally = Tally()
    for k in range(9):
        tally.add_failure(RuntimeError(f"error {k}"))
    assert tally.failed == 9
    assert tally.errors == [f"error {k}" for k in range(4, 9)]


SLOW_AT_FIRST = """
import json, sys

first, second = (json.loads(sys.stdin.readline()) for _ in range(2))
for job in (first, second):
    turns = [[job["api_key"], "text", 2]]
    print(json.dumps({"job": job.get("job"), "turns": turns}), flush=True)
"""


async def test_an_answer_that_came_too_late_is_not_the_next_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SLOW_AT_FIRST,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    worker, item = Worker(process), items(held_out=True)[0]
    with monkeypatch.context() as short:
        short.setattr(driver_module, "_AGENT_TIMEOUT", 0.05)
        with pytest.raises(TimeoutError):
            await worker.run(item, session("first"))
    assert await worker.run(item, session("second")) == [TaskTurn("second", "text", 2)]
    await process.wait()


def session(key: str) -> SessionStarted:
    return SessionStarted(
        session_id="ses-0-1",
        api_key=key,
        base_url="http://nowhere",
        mode="train",
        version=0,
        group_id=None,
        task_id="t",
        expires_in=1.0,
    )


class Service:
    """Answers openings with what it is told to; remembers what became of the sessions."""

    def __init__(self, *openings: BaseException | None) -> None:
        self._openings = iter(openings)
        self.ended: list[str] = []

    async def start_session(self, **fields: Any) -> SessionStarted:
        error = next(self._openings, RunFinished("done"))
        if error is not None:
            raise error
        return SessionStarted(
            session_id="ses-0-1",
            api_key="key",
            base_url="http://nowhere",
            mode="train",
            version=0,
            group_id=None,
            task_id=fields["task_id"],
            expires_in=fields["ttl"],
        )

    async def set_reward(self, *_: Any, **__: Any) -> None: ...

    async def finalize(self, _: str) -> None:
        self.ended.append("finalized")

    async def abort(self, *_: Any) -> None:
        self.ended.append("aborted")


class Agent:
    """Is always right, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def run(self, item: Item, _: SessionStarted) -> list[TaskTurn]:
        if self._error is not None:
            raise self._error
        return [TaskTurn("turn-0", item.digit, 2)]


async def train(service: Service, agent: Agent) -> Tally:
    tally = Tally()
    await Driver(service, [agent], seed=0).train(tally)  # type: ignore[arg-type, list-item]
    return tally


async def test_a_lost_answer_ends_nothing_but_its_session() -> None:
    """A part of the service died; the agents go on."""
    service = Service(None, ReplyLost("a rank died"), None)
    tally = await train(service, Agent())
    assert (tally.sessions, tally.failed, tally.errors) == (2, 1, ["a rank died"])
    assert service.ended == ["finalized", "finalized"]


async def test_a_session_that_failed_is_aborted_so_that_its_group_goes_on() -> None:
    service = Service(None, None)
    tally = await train(service, Agent(RuntimeError("the agent broke")))
    assert (tally.sessions, tally.failed) == (0, 2)
    assert service.ended == ["aborted", "aborted"]


async def test_nobody_waits_for_a_trainer_that_wants_nothing_any_more() -> None:
    with pytest.raises(ExceptionGroup) as group:
        await train(Service(None, TooManyRequests("no slot")), Agent())
    assert group.group_contains(TooManyRequests)


async def test_failures_without_end_end_the_demo() -> None:
    with pytest.raises(ExceptionGroup) as group:
        await train(Service(*[None] * 1000), Agent(RuntimeError("the agent broke")))
    assert group.group_contains(AnyAgentError, match="101 sessions failed: the agent broke")


async def test_each_held_out_prompt_is_asked_some_times() -> None:
    tally = Tally()
    await Driver(Service(*[None] * 1000), [Agent()] * 3, seed=0).evaluate(tally)  # type: ignore[arg-type, list-item]
    assert tally.sessions == EVALS * len(items(held_out=True))
    assert tally.measures().accuracy == 1.0
