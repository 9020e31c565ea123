"""The executor over two ranks: who is told what, and what one of them that is away may hold up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from any_agent.config import RolloutConfig
from any_agent.errors import Conflict, NotFound, ServiceUnavailable
from any_agent.protocol.training import Rejection
from any_agent.record import pack_trajectories
from any_agent.rollout import Consumed, LeaseExecutor
from any_agent.rollout import lease_executor as module
from any_agent.rundir.fleet import Fleet
from any_agent.types import Trajectory
from any_agent.workflow import Episode
from tests.support.errors import fails_with
from tests.support.fixed_ranks import FixedRanks
from tests.support.lease_executor import Service
from tests.support.workflow_executor import until


def sid(rank: int, number: int) -> str:
    return f"ses-{rank}-{number:016x}"


def group(rank: int, name: str, *numbers: int) -> Episode:
    return [Trajectory(sid(rank, number), name, []) for number in numbers]


class Home(Service):
    """A rank that can be asked for sessions by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.left = False
        """Its polls were cancelled."""
        self.replayed: list[list[str]] = []

    async def ack(
        self, *, owner: str, trained: list[str], rejected: list[Rejection], step: int | None = None
    ) -> int:
        if self.away:
            raise ServiceUnavailable("away")
        return await super().ack(owner=owner, trained=trained, rejected=rejected, step=step)

    async def lease(self, *, owner: str, wait: float, max_groups: int = 1) -> bytes | None:
        try:
            return await super().lease(owner=owner, wait=wait, max_groups=max_groups)
        except asyncio.CancelledError:
            self.left = True
            raise

    async def replay(self, *, owner: str, session_ids: list[str]) -> bytes:
        assert owner == "me"
        if self.lost & set(session_ids):
            raise Conflict("one of them is open")
        self.replayed.append(session_ids)
        return pack_trajectories([Trajectory(id, "g", []) for id in session_ids])


class Lab:
    def __init__(self, *, begin: bool = True, **settings: Any) -> None:
        self.consumed: dict[str, Consumed] = {}
        self.services = (Home(), Home())
        config = {"batch_size": 4, "max_concurrent": 8, "eta": 1, **settings}
        self.executor = LeaseExecutor(
            self._make_ranks, RolloutConfig(**config), owner="me", consumed=self.consumed
        )
        self.executor.start()
        if begin:
            self.executor.begin()

    def _make_ranks(self) -> FixedRanks:
        self.ranks = FixedRanks(*self.services)
        return self.ranks

    def give(self, rank: int, *episodes: Episode) -> None:
        self.services[rank].script.give(*episodes)


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.executor.stop()
    assert all(service.closed for service in lab.services)


def test_each_rank_hears_of_its_own_sessions(lab: Lab) -> None:
    zero, one = lab.services
    lab.give(0, group(0, "a", 1, 2))
    lab.give(1, group(1, "b", 1, 2))
    assert len(lab.executor.prepare_batch(timeout=60)) == 2
    until(lambda: zero.held[-1] == [sid(0, 1), sid(0, 2)])
    until(lambda: one.held[-1] == [sid(1, 1), sid(1, 2)])
    stale = Rejection(session_id=sid(1, 2), reason="stale")
    lab.executor.ack([sid(1, 1), sid(0, 1), sid(0, 2)], [stale])
    assert zero.acks == [([sid(0, 1), sid(0, 2)], [])]
    assert one.acks == [([sid(1, 1)], [sid(1, 2)])]
    until(lambda: zero.held[-1] == one.held[-1] == [])


def test_a_rank_that_is_away_holds_up_no_ack(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACK_TIMEOUT", 0.2)
    zero, one = lab.services
    # What is handed out twice is taken once.
    lab.give(0, group(0, "a", 1, 2), group(0, "a", 1, 2), group(0, "a", 2), group(0, "a2", 3))
    lab.give(1, group(1, "b", 1))
    batch = lab.executor.prepare_batch(timeout=60)
    taken = sorted(t.session_id for e in batch for t in e)
    assert taken == [sid(0, 1), sid(0, 2), sid(0, 3), sid(1, 1)]
    one.away = True
    lab.executor.ack([sid(0, 1), sid(1, 1)], [])
    lab.executor.ack([sid(0, 2)], [])
    assert [trained for trained, _ in zero.acks] == [[sid(0, 1)], [sid(0, 2)]]
    # Not lost: its lease is held, and it is told once it is back, at the latest at the end.
    until(lambda: one.held[-1] == [sid(1, 1)])
    lab.executor.flush()
    assert one.acks == []
    monkeypatch.setattr(module, "ACK_TIMEOUT", 10.0)
    one.away = False
    lab.executor.flush()
    assert one.acks == [([sid(1, 1)], [])]
    until(lambda: one.held[-1] == [])


def test_a_restarted_executor_acknowledges_again_exactly_what_steps_took(lab: Lab) -> None:
    """Its acknowledgement was lost with the trainer that sent it."""
    zero, one = lab.services
    lab.consumed |= {
        sid(0, 1): Consumed(7),
        sid(0, 2): Consumed(7, "stale"),
        sid(1, 1): Consumed(6),
        sid(1, 4): Consumed(None, "not_finite"),
    }
    lab.give(0, group(0, "a", 1, 2), group(0, "new", 5, 6))
    lab.give(1, group(1, "b", 1, 2, 3, 4))
    batch = lab.executor.prepare_batch(timeout=60)
    assert {t.session_id for e in batch for t in e} == {sid(0, 5), sid(0, 6), sid(1, 2), sid(1, 3)}
    until(lambda: zero.acks == [([sid(0, 1)], [sid(0, 2)])])
    until(lambda: one.acks == [([sid(1, 1)], []), ([], [sid(1, 4)])])
    assert (zero.steps, one.steps) == ([7], [6, None])
    until(lambda: zero.held[-1] == [sid(0, 5), sid(0, 6)])


def test_an_executor_that_has_not_begun_replays_but_admits_nothing() -> None:
    lab = Lab(begin=False)
    zero, one = lab.services
    ids = [sid(rank, number) for number in range(100) for rank in (1, 0)]
    found = lab.executor.replay(ids, timeout=60)
    assert found.keys() == set(ids)
    assert [len(part) for part in zero.replayed] == [64, 36]
    assert one.replayed[0][:2] == [sid(1, 0), sid(1, 1)]
    until(lambda: len(zero.held[-1]) == len(one.held[-1]) == 100)
    assert {*zero.limits, *one.limits} == {0}
    assert not any(service.script.started.is_set() for service in lab.services)
    zero.lost = {ids[1]}
    with fails_with(Conflict, "open"):
        lab.executor.replay(ids, timeout=60)
    # Nobody will settle them: the ranks take them back.
    until(lambda: zero.held[-1] == one.held[-1] == [])
    lab.executor.begin()
    until(lambda: zero.limits[-1] == one.limits[-1] == 4)
    assert all(service.script.started.wait(60) for service in lab.services)
    lab.executor.stop()


@pytest.mark.parametrize("deterministic", [True, False])
def test_batches_are_sorted_in_a_deterministic_run_only(deterministic: bool) -> None:
    lab = Lab(deterministic=deterministic)
    lab.give(0, group(0, "b", 2, 1))
    until(lambda: sid(0, 2) in (lab.services[0].held or [[]])[-1])
    lab.give(1, group(1, "a", 4, 3))
    batch = lab.executor.prepare_batch(timeout=60)
    ids = [t.session_id for episode in batch for t in episode]
    came = [sid(0, 2), sid(0, 1), sid(1, 4), sid(1, 3)]
    assert ids == ([*came[:1:-1], *came[1::-1]] if deterministic else came)
    lab.executor.stop()


async def test_stopping_ends_an_ack_that_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACK_TIMEOUT", 0.05)
    lab = Lab()
    lab.services[1].away = True
    await asyncio.to_thread(lab.executor.ack, [sid(1, 1)], [])
    async with asyncio.timeout(60):
        await asyncio.to_thread(lab.executor.stop)


def test_an_added_rank_is_leased_from(lab: Lab) -> None:
    two, ids = Home(), [sid(2, k) for k in (1, 2, 3, 4)]
    lab.services = (*lab.services, two)
    lab.ranks.change(Fleet.of(2).with_state(2, "joining"), rank_2=two)
    lab.give(2, group(2, "c", 1, 2, 3, 4))
    (batch,) = lab.executor.prepare_batch(timeout=60)
    assert [t.session_id for t in batch] == ids
    lab.executor.ack(ids, [])
    assert two.acks == [(ids, [])]


def test_a_rank_that_has_ended_fails_nothing(lab: Lab) -> None:
    """Its last acknowledgement may have had an effect without an answer."""
    zero, one = lab.services
    lab.give(1, group(1, "b", 1, 2, 3, 4))
    lab.executor.prepare_batch(timeout=60)
    one.away = True
    lab.ranks.change(Fleet.of(2).with_state(1, None))
    lab.executor.ack([sid(1, 1)], [])
    until(lambda: zero.held and one.left)
    one.failures = {"capacity": [NotFound("it is gone")]}
    with fails_with(NotFound, "rank 1"):
        lab.executor.replay([sid(0, 1), sid(1, 1)], timeout=60)
    lab.give(0, group(0, "a", 1, 2, 3, 4))
    assert len(lab.executor.prepare_batch(timeout=60)) == 1
