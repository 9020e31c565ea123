"""The executor against one scripted rank, or two of which one may be away."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from any_agent.client.rl_client import RLClient
from any_agent.config import RolloutConfig
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    EngineUnavailable,
    NotFound,
    ServiceUnavailable,
    StaleOwner,
    StoreUnavailable,
    from_response,
)
from any_agent.protocol.training import Capacity, Rejection
from any_agent.record import pack_trajectories
from any_agent.rollout import Consumed, LeaseExecutor
from any_agent.rollout import lease_executor as module
from any_agent.rundir.fleet import Fleet
from any_agent.types import Trajectory
from any_agent.workflow import Episode
from tests.support.errors import fails_with
from tests.support.fixed_ranks import FixedRanks
from tests.support.workflow_executor import until


def episode(name: str, size: int = 2) -> Episode:
    return [Trajectory(f"{name}-{k}", name, []) for k in range(size)]


class OneRank(FixedRanks):
    """Stands for `RankClients`: whatever the session's name."""

    def home(self, session_id: str) -> int:
        return 0


class Scripted:
    """The answers to polls: episodes (or errors) from a queue that any thread may fill."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._queue: asyncio.Queue[Episode | AnyAgentError | None] = asyncio.Queue()
        self.started = threading.Event()

    def give(self, *items: Episode | AnyAgentError | None) -> None:
        assert self.started.wait(60)
        assert self.loop is not None
        for item in items:
            self.loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def poll(self) -> bytes | None:
        self.loop = asyncio.get_running_loop()
        self.started.set()
        item = await self._queue.get()
        if isinstance(item, AnyAgentError):
            raise item
        return None if item is None else pack_trajectories(item)


class Home(RLClient):
    """A scripted rank that remembers what it was told, and can be asked for sessions by their ids.

    ``failures`` are raised by the next calls of a kind.
    """

    def __init__(self, script: Scripted | None = None) -> None:
        self.script = script or Scripted()
        self.limits: list[int] = []
        self.held: list[list[str]] = []
        self.acks: list[tuple[list[str], list[str]]] = []
        self.failures: dict[str, list[AnyAgentError]] = {}
        self.steps: list[int | None] = []
        """Of each ack."""
        self.lost: set[str] = set()
        self.state = {"admitted": 0, "reserved": 0, "waiting": 0, "running": 0, "buffered": 0}
        self.closed = False
        self.away = False
        self.left = False
        """Its polls were cancelled."""
        self.replayed: list[list[str]] = []

    def _maybe_fail(self, kind: str) -> None:
        if self.failures.get(kind):
            raise self.failures[kind].pop(0)

    async def set_capacity(
        self, *, limit: int, owner: str, held: list[str], **_: object
    ) -> Capacity:
        self._maybe_fail("capacity")
        assert owner == "me"
        self.limits.append(limit)
        self.held.append(held)
        return Capacity(**self.state, limit=limit)

    async def ack(
        self, *, owner: str, trained: list[str], rejected: list[Rejection], step: int | None = None
    ) -> int:
        if self.away:
            raise ServiceUnavailable("away")
        self._maybe_fail("ack")
        if self.lost & {*trained, *(r.session_id for r in rejected)}:
            raise Conflict("a lease was lost")
        self.acks.append((trained, [r.session_id for r in rejected]))
        self.steps.append(step)
        return len(trained) + len(rejected)

    async def lease(self, *, owner: str, wait: float, max_groups: int = 1) -> bytes | None:
        assert owner == "me"
        try:
            return await self.script.poll()
        except asyncio.CancelledError:
            self.left = True
            raise

    async def replay(self, *, owner: str, session_ids: list[str]) -> bytes:
        assert owner == "me"
        if self.lost & set(session_ids):
            raise Conflict("one of them is open")
        self.replayed.append(session_ids)
        return pack_trajectories([Trajectory(id, "g", []) for id in session_ids])

    async def close(self) -> None:
        self.closed = True


class Lab:
    """An executor on these ranks, or one; ``settings`` are its configuration's."""

    def __init__(
        self,
        *services: Home,
        begin: bool = True,
        reject: Callable[[Episode], str | None] = lambda _: None,
        **settings: Any,
    ) -> None:
        self.services = services or (Home(),)
        self.service = self.services[0]
        self.script = self.service.script
        self.consumed: dict[str, Consumed] = {}
        self.executor = LeaseExecutor(
            self._make_ranks,
            RolloutConfig(**{"batch_size": 4, "max_concurrent": 8, "eta": 1, **settings}),
            owner="me",
            reject=reject,
            consumed=self.consumed,
        )
        self.executor.start()
        if begin:
            self.executor.begin()

    def _make_ranks(self) -> FixedRanks:
        kind = OneRank if len(self.services) == 1 else FixedRanks
        self.ranks = kind(*self.services)
        return self.ranks

    def give(self, rank: int, *episodes: Episode) -> None:
        self.services[rank].script.give(*episodes)


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

    lab = Lab(Home(Failing()))
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


def sid(rank: int, number: int) -> str:
    return f"ses-{rank}-{number:016x}"


def group(rank: int, name: str, *numbers: int) -> Episode:
    return [Trajectory(sid(rank, number), name, []) for number in numbers]


@pytest.fixture
def two() -> Iterator[Lab]:
    lab = Lab(Home(), Home())
    yield lab
    lab.executor.stop()
    assert all(service.closed for service in lab.services)


def test_each_rank_hears_of_its_own_sessions(two: Lab) -> None:
    zero, one = two.services
    two.give(0, group(0, "a", 1, 2))
    two.give(1, group(1, "b", 1, 2))
    assert len(two.executor.prepare_batch(timeout=60)) == 2
    until(lambda: zero.held[-1] == [sid(0, 1), sid(0, 2)])
    until(lambda: one.held[-1] == [sid(1, 1), sid(1, 2)])
    stale = Rejection(session_id=sid(1, 2), reason="stale")
    two.executor.ack([sid(1, 1), sid(0, 1), sid(0, 2)], [stale])
    assert zero.acks == [([sid(0, 1), sid(0, 2)], [])]
    assert one.acks == [([sid(1, 1)], [sid(1, 2)])]
    until(lambda: zero.held[-1] == one.held[-1] == [])


def test_a_rank_that_is_away_holds_up_no_ack(two: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACK_TIMEOUT", 0.2)
    zero, one = two.services
    # What is handed out twice is taken once.
    two.give(0, group(0, "a", 1, 2), group(0, "a", 1, 2), group(0, "a", 2), group(0, "a2", 3))
    two.give(1, group(1, "b", 1))
    batch = two.executor.prepare_batch(timeout=60)
    taken = sorted(t.session_id for e in batch for t in e)
    assert taken == [sid(0, 1), sid(0, 2), sid(0, 3), sid(1, 1)]
    one.away = True
    two.executor.ack([sid(0, 1), sid(1, 1)], [])
    two.executor.ack([sid(0, 2)], [])
    assert [trained for trained, _ in zero.acks] == [[sid(0, 1)], [sid(0, 2)]]
    # Not lost: its lease is held, and it is told once it is back, at the latest at the end.
    until(lambda: one.held[-1] == [sid(1, 1)])
    two.executor.flush()
    assert one.acks == []
    monkeypatch.setattr(module, "ACK_TIMEOUT", 10.0)
    one.away = False
    two.executor.flush()
    assert one.acks == [([sid(1, 1)], [])]
    until(lambda: one.held[-1] == [])


def test_a_restarted_executor_acknowledges_again_exactly_what_steps_took(two: Lab) -> None:
    """Its acknowledgement was lost with the trainer that sent it."""
    zero, one = two.services
    two.consumed |= {
        sid(0, 1): Consumed(7),
        sid(0, 2): Consumed(7, "stale"),
        sid(1, 1): Consumed(6),
        sid(1, 4): Consumed(None, "not_finite"),
    }
    two.give(0, group(0, "a", 1, 2), group(0, "new", 5, 6))
    two.give(1, group(1, "b", 1, 2, 3, 4))
    batch = two.executor.prepare_batch(timeout=60)
    assert {t.session_id for e in batch for t in e} == {sid(0, 5), sid(0, 6), sid(1, 2), sid(1, 3)}
    until(lambda: zero.acks == [([sid(0, 1)], [sid(0, 2)])])
    until(lambda: one.acks == [([sid(1, 1)], []), ([], [sid(1, 4)])])
    assert (zero.steps, one.steps) == ([7], [6, None])
    until(lambda: zero.held[-1] == [sid(0, 5), sid(0, 6)])


def test_an_executor_that_has_not_begun_replays_but_admits_nothing() -> None:
    two = Lab(Home(), Home(), begin=False)
    zero, one = two.services
    ids = [sid(rank, number) for number in range(100) for rank in (1, 0)]
    found = two.executor.replay(ids, timeout=60)
    assert found.keys() == set(ids)
    assert [len(part) for part in zero.replayed] == [64, 36]
    assert one.replayed[0][:2] == [sid(1, 0), sid(1, 1)]
    until(lambda: len(zero.held[-1]) == len(one.held[-1]) == 100)
    assert {*zero.limits, *one.limits} == {0}
    assert not any(service.script.started.is_set() for service in two.services)
    zero.lost = {ids[1]}
    with fails_with(Conflict, "open"):
        two.executor.replay(ids, timeout=60)
    # Nobody will settle them: the ranks take them back.
    until(lambda: zero.held[-1] == one.held[-1] == [])
    two.executor.begin()
    until(lambda: zero.limits[-1] == one.limits[-1] == 4)
    assert all(service.script.started.wait(60) for service in two.services)
    two.executor.stop()


@pytest.mark.parametrize("deterministic", [True, False])
def test_batches_are_sorted_in_a_deterministic_run_only(deterministic: bool) -> None:
    two = Lab(Home(), Home(), deterministic=deterministic)
    two.give(0, group(0, "b", 2, 1))
    until(lambda: sid(0, 2) in (two.services[0].held or [[]])[-1])
    two.give(1, group(1, "a", 4, 3))
    batch = two.executor.prepare_batch(timeout=60)
    ids = [t.session_id for episode in batch for t in episode]
    came = [sid(0, 2), sid(0, 1), sid(1, 4), sid(1, 3)]
    assert ids == ([*came[:1:-1], *came[1::-1]] if deterministic else came)
    two.executor.stop()


async def test_stopping_ends_an_ack_that_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACK_TIMEOUT", 0.05)
    two = Lab(Home(), Home())
    two.services[1].away = True
    await asyncio.to_thread(two.executor.ack, [sid(1, 1)], [])
    async with asyncio.timeout(60):
        await asyncio.to_thread(two.executor.stop)


def test_an_added_rank_is_leased_from(two: Lab) -> None:
    third, ids = Home(), [sid(2, k) for k in (1, 2, 3, 4)]
    two.services = (*two.services, third)
    two.ranks.change(Fleet.of(2).with_state(2, "joining"), rank_2=third)
    two.give(2, group(2, "c", 1, 2, 3, 4))
    (batch,) = two.executor.prepare_batch(timeout=60)
    assert [t.session_id for t in batch] == ids
    two.executor.ack(ids, [])
    assert third.acks == [(ids, [])]


def test_a_rank_that_has_ended_fails_nothing(two: Lab) -> None:
    """Its last acknowledgement may have had an effect without an answer."""
    zero, one = two.services
    two.give(1, group(1, "b", 1, 2, 3, 4))
    two.executor.prepare_batch(timeout=60)
    one.away = True
    two.ranks.change(Fleet.of(2).with_state(1, None))
    two.executor.ack([sid(1, 1)], [])
    until(lambda: zero.held and one.left)
    one.failures = {"capacity": [NotFound("it is gone")]}
    with fails_with(NotFound, "rank 1"):
        two.executor.replay([sid(0, 1), sid(1, 1)], timeout=60)
    two.give(0, group(0, "a", 1, 2, 3, 4))
    assert len(two.executor.prepare_batch(timeout=60)) == 1
