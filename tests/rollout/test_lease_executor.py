"""The executor against a scripted service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from any_agent.config import RolloutConfig
from any_agent.errors import (
    AnyAgentError,
    EngineUnavailable,
    ServiceUnavailable,
    StaleOwner,
    StoreUnavailable,
    from_response,
)
from any_agent.protocol.training import Rejection
from any_agent.rollout import LeaseExecutor
from any_agent.rollout import lease_executor as module
from any_agent.types import Trajectory
from any_agent.workflow import Episode
from tests.support.errors import fails_with
from tests.support.fixed_ranks import FixedRanks
from tests.support.lease_executor import Scripted, Service
from tests.support.workflow_executor import until

CONFIG = RolloutConfig(batch_size=4, max_concurrent=8, eta=1)


def episode(name: str, size: int = 2) -> Episode:
    return [Trajectory(f"{name}-{k}", name, []) for k in range(size)]


class OneRank(FixedRanks):
    """Stands for `RankClients`: whatever the session's name."""

    def home(self, session_id: str) -> int:
        return 0


class Lab:
    def __init__(
        self,
        reject: Callable[[Episode], str | None] = lambda _: None,
        script: Scripted | None = None,
    ) -> None:
        self.service = Service(script)
        self.script = self.service.script
        self.executor = LeaseExecutor(
            lambda: OneRank(self.service),  # type: ignore[arg-type,return-value]
            CONFIG,
            owner="me",
            reject=reject,
        )
        self.executor.start()
        self.executor.begin()


def judge(episode: Episode) -> str | None:
    if episode[0].group_id.startswith("odd"):
        raise ValueError("the reward of interaction 3 is nan")
    return "dull" if episode[0].group_id.startswith("dull") else None


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab(reject=judge)
    yield lab
    lab.executor.stop()
    assert lab.service.closed


def test_a_batch_is_the_oldest_episodes_with_enough_sessions(lab: Lab) -> None:
    lab.script.give(episode("a"), episode("b", 1), episode("c"), episode("d"))
    batch = lab.executor.prepare_batch(timeout=60)
    assert [e[0].group_id for e in batch] == ["a", "b", "c"]
    until(lambda: "d-0" in lab.service.held[-1] and lab.executor.capacity is not None)
    with fails_with(TimeoutError, "2 of 4", "no agent"):
        lab.executor.prepare_batch(timeout=0.01)
    lab.script.give(episode("e"))
    assert [e[0].group_id for e in lab.executor.prepare_batch(timeout=60)] == ["d", "e"]


def test_the_admission_limit_follows_the_formula_and_leases_are_held(lab: Lab) -> None:
    until(lambda: lab.service.limits[-1:] == [8])  # min(8, 2 * 4) on top of 0 admitted
    lab.service.state |= {"admitted": 6, "running": 4, "buffered": 2}
    lab.script.give(episode("a"))
    until(lambda: lab.service.limits[-1] == 6 + min(8 - 4, 8 - 6))
    until(lambda: lab.service.held[-1] == ["a-0", "a-1"])
    lab.executor.ack(["a-0"], [Rejection(session_id="a-1", reason="stale")])
    assert lab.service.acks == [(["a-0"], ["a-1"])]
    until(lambda: lab.service.held[-1] == [])


def test_dull_episodes_and_those_that_cannot_be_judged_are_left_out(lab: Lab) -> None:
    """One agent's data must not end the training of all; there are more of them than polls."""
    odd = [episode(f"odd{k}") for k in range(10)]
    lab.script.give(episode("dull"), None, *odd, episode("a"), episode("b"))
    batch = lab.executor.prepare_batch(timeout=60)
    assert [e[0].group_id for e in batch] == ["a", "b"]
    until(lambda: len(lab.service.acks) == 11)
    assert lab.executor.rejected == {"dull": 2, "unusable": 20}
    assert sorted(id for _, rejected in lab.service.acks for id in rejected) == sorted(
        f"{name}-{i}" for name in ("dull", *(f"odd{k}" for k in range(10))) for i in range(2)
    )


def test_a_service_that_is_away_for_a_moment_is_asked_again(lab: Lab) -> None:
    lab.service.failures = {
        "capacity": [ServiceUnavailable("away")] * 2,
        "ack": [StoreUnavailable("full")] * 2,
    }
    lab.script.give(EngineUnavailable("away"), episode("dull"), episode("a"), episode("b"))
    assert len(lab.executor.prepare_batch(timeout=60)) == 2
    until(lambda: lab.service.acks == [([], ["dull-0", "dull-1"])])
    lab.service.failures = {"ack": [StoreUnavailable("full")]}
    lab.executor.ack(["a-0", "a-1"], [])
    assert lab.service.acks[-1] == (["a-0", "a-1"], [])


def test_with_one_lease_lost_the_others_are_acknowledged(lab: Lab) -> None:
    """The service ends all or none, so they would be handed out, and trained on, again."""
    lab.script.give(episode("a"), episode("b"))
    lab.executor.prepare_batch(timeout=60)
    lab.service.lost = {"a-1"}
    lab.executor.ack(["a-0", "a-1", "b-0"], [Rejection(session_id="b-1", reason="stale")])
    assert lab.service.acks == [(["a-0"], []), (["b-0"], []), ([], ["b-1"])]
    until(lambda: lab.service.held[-1] == [])


def test_an_internal_error_of_one_poll_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_RETRY_DELAY", 0.0)
    # Each poll counts its own errors, and two could share these unevenly.
    monkeypatch.setattr(module, "POLLS_PER_RANK", 1)
    lab = Lab()
    odd = from_response(500, b"odd", None)
    for name in ("a", "b"):
        # A good answer in between begins the count anew.
        lab.script.give(*[odd] * module.MAX_FAILED_POLLS, episode(name))
    assert len(lab.executor.prepare_batch(timeout=60)) == 2
    lab.script.give(*[odd] * (2 * module.MAX_FAILED_POLLS + 2))
    with fails_with(AnyAgentError, "odd"):
        lab.executor.prepare_batch(timeout=60)
    lab.executor.stop()


@pytest.mark.parametrize("error", [TimeoutError, InterruptedError, asyncio.CancelledError])
def test_a_poll_that_ended_is_not_taken_for_a_wait_that_ended(
    error: type[BaseException],
) -> None:
    class Failing(Scripted):
        async def poll(self) -> bytes | None:
            raise error

    lab = Lab(script=Failing())
    with fails_with(RuntimeError, error.__name__):
        lab.executor.prepare_batch(timeout=60)
    lab.executor.stop()


@pytest.mark.parametrize("where", ["capacity", "ack"])
def test_a_trainer_that_another_took_over_from_ends(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(module, "ACK_TIMEOUT", 0.0)
    lab = Lab()
    lab.service.failures[where] = [StaleOwner("start 2 took over") for _ in range(9)]
    lab.executor.ack(["a-0"], [], step=1)
    with pytest.raises(StaleOwner):
        lab.executor.prepare_batch(timeout=60)
    lab.executor.stop()
