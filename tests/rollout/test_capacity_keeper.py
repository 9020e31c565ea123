"""The bound on admitted sessions holds over ranks, whatever happens to the messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from any_agent.config import RolloutConfig
from any_agent.errors import ServiceUnavailable, Unauthenticated
from any_agent.protocol.training import Capacity
from any_agent.rollout import capacity_keeper as module
from any_agent.rollout.capacity_keeper import CapacityKeeper
from any_agent.rundir.fleet import Fleet
from proxy_ext.sessions.slots import Admission, Ticket
from tests.support.fixed_ranks import FixedRanks


@dataclass(slots=True)
class Message:
    limit: int
    number: int


@dataclass(slots=True, eq=False)
class Rank:
    """A proxy's admission with sessions that are mere numbers, behind a bad network."""

    fate: Callable[[], str] = lambda: "answered"
    admission: Admission = field(default_factory=lambda: Admission(max_waiting=100))
    asked: list[Ticket] = field(default_factory=list)
    reserved: int = 0
    running: int = 0
    buffered: int = 0
    trained: int = 0
    heard: int = 0
    late: list[Message] = field(default_factory=list)
    hanging: list[asyncio.Event] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    async def set_capacity(
        self,
        *,
        limit: int,
        ttl: float,
        owner: str,
        held: list[str],
        number: int,
        retry_for: float,
    ) -> Capacity:
        assert retry_for <= 5, "what is held would be out of date"
        message = Message(limit, number)
        self.messages.append(message)
        fate = self.fate()
        if fate == "hanging":
            released = asyncio.Event()
            self.hanging.append(released)
            await released.wait()
        if fate == "lost":
            raise ServiceUnavailable("lost")
        if fate == "repeated":
            self.late.append(message)
        answer = self.deliver(message)
        if fate == "answer lost":
            raise ServiceUnavailable("the answer was lost")
        return answer

    def deliver(self, message: Message) -> Capacity:
        if message.number >= self.heard:
            self.heard = message.number
            self.admission.set_limit(message.limit, 60)
        for ticket in [ticket for ticket in self.asked if ticket.granted]:
            self.asked.remove(ticket)
            self.reserved += ticket.slots
        return Capacity(
            admitted=self.admission.admitted,
            reserved=self.reserved,
            waiting=self.admission.waiting,
            running=self.running,
            buffered=self.buffered,
            limit=self.admission.limit,
            queue=self.admission.queue,
        )

    def ask(self, slots: int) -> None:
        ticket = self.admission.request(slots)
        if ticket.granted:
            self.reserved += slots
        else:
            self.asked.append(ticket)

    def restart(self) -> None:
        """What the journal holds goes on; what only memory held is gone."""
        self.admission = Admission(
            admitted=self.reserved + self.running + self.buffered + self.trained, max_waiting=100
        )
        self.asked.clear()
        self.heard = 0
        # Their connections ended with the process.
        self.late.clear()

    async def close(self) -> None: ...


CONFIG = RolloutConfig(batch_size=8, max_concurrent=12, eta=1)


def keeper_of(
    *ranks: Rank, fleet: FixedRanks | None = None, config: RolloutConfig = CONFIG, open: bool = True
) -> CapacityKeeper:
    keeper = CapacityKeeper(fleet or FixedRanks(*ranks), config, owner="me", held=lambda _: [])
    keeper.open = open
    return keeper


def limits(rank: Rank) -> list[int]:
    return [message.limit for message in rank.messages]


async def test_a_draining_rank_keeps_no_headroom() -> None:
    zero, one = Rank(), Rank()
    ranks = FixedRanks(zero, one)
    keeper = keeper_of(fleet=ranks)
    await keeper.round()
    assert limits(zero)[-1] == limits(one)[-1] == 6
    one.ask(2)
    one.ask(8)
    ranks.change(Fleet.of(2).with_state(1, "draining"))
    await keeper.round()
    assert limits(one)[-1] == 2, "its open group has its slots, and nothing else does"
    await keeper.round()
    assert limits(zero)[-1] == 10, "the others have what it had"


async def test_an_added_rank_gets_room_once_it_serves() -> None:
    zero, two = Rank(), Rank()
    ranks = FixedRanks(zero)
    keeper = keeper_of(fleet=ranks)
    await keeper.round()
    assert limits(zero)[-1] == 12
    ranks.change(Fleet.of(1).with_state(2, "joining"), rank_2=two)
    await keeper.round()
    assert (limits(zero)[-1], set(limits(two))) == (12, {0})
    ranks.change(Fleet.of(1).with_state(2, "serving"))
    await keeper.round()
    assert (limits(zero)[-1], limits(two)[-1]) == (6, 6)


async def test_a_rank_that_has_ended_is_forgotten() -> None:
    zero, one, two = Rank(), Rank(), Rank(fate=lambda: "lost")
    ranks = FixedRanks(zero, one)
    keeper = keeper_of(fleet=ranks)
    await keeper.round()
    told = len(limits(one))
    ranks.change(Fleet.of(2).with_state(1, None))
    await keeper.round()
    assert (limits(zero)[-1], len(limits(one))) == (12, told)
    ranks.change(Fleet.of(1).with_state(2, "serving"), rank_2=two)
    await keeper.round()
    assert limits(zero)[-1] == 12, "one that was added and does not answer stops nobody"


async def test_a_keeper_that_is_not_open_admits_nothing() -> None:
    ranks = Rank(admission=Admission(admitted=7, max_waiting=9)), Rank()
    keeper = keeper_of(*ranks, open=False)
    for rank in ranks:
        # An earlier trainer's word still holds.
        rank.admission.set_limit(20, 60)
    await keeper.round()
    assert [limits(rank) for rank in ranks] == [[0], [0]]
    for rank in ranks:
        rank.ask(1)
        assert rank.reserved == 0
    assert not keeper.admits
    keeper.open = True
    await keeper.round()
    assert keeper.admits
    assert [limits(rank)[-1] for rank in ranks] == [7 + 6, 6]


async def test_nothing_is_raised_before_every_rank_has_answered() -> None:
    away, here = Rank(fate=lambda: "lost"), Rank()
    keeper = keeper_of(away, here)
    await keeper.round()
    assert limits(here) == [0]
    assert keeper.now is None and not keeper.admits
    away.fate = lambda: "answered"
    await keeper.round()
    assert [limits(rank)[-1] for rank in (away, here)] == [6, 6]
    assert keeper.now is not None and keeper.admits
    assert keeper.now.waiting == 0


async def test_headroom_is_taken_back_before_it_is_given_elsewhere() -> None:
    zero, one = Rank(), Rank()
    keeper = keeper_of(zero, one)
    await keeper.round()
    one.ask(8)
    zero.fate = iter(["answered", "answer lost"]).__next__
    await keeper.round()
    # Its answer was lost, so it may have admitted six by now: nothing was raised.
    assert (limits(zero)[-1], limits(one)[-1]) == (2, 6)
    assert one.reserved == 0
    zero.fate = lambda: "answered"
    await keeper.round()
    assert (one.deliver(one.messages[-1]).reserved, limits(one)[-1]) == (8, 8 + 2)


async def test_a_rank_that_does_not_answer_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT", 0.05)
    zero, one = Rank(), Rank()
    keeper = keeper_of(zero, one)
    await keeper.round()
    zero.fate = lambda: "hanging"
    one.ask(4)
    one.ask(4)
    await keeper.round()
    assert one.deliver(one.messages[-1]).reserved == 4
    # Six may be admitted there, so the second group does not fit yet.
    assert len(zero.hanging) == 1
    for _ in range(3):
        await keeper.round()
    assert len(zero.hanging) == 1, "one message at a time"
    zero.fate = lambda: "answered"
    zero.hanging[0].set()
    await keeper.round()
    await keeper.round()
    assert one.deliver(one.messages[-1]).reserved == 8


async def test_a_rank_that_always_answers_late_gets_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT", 0.05)

    class Slow(Rank):
        async def set_capacity(self, **message: Any) -> Capacity:
            await asyncio.sleep(0.15)
            return await super().set_capacity(**message)

    quick, slow = Rank(), Slow()
    running = asyncio.create_task(keeper_of(quick, slow).run())
    async with asyncio.timeout(60):
        while [limits(rank)[-1:] for rank in (quick, slow)] != [[6], [6]]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()


async def test_an_error_that_no_retry_mends_ends_the_keeper() -> None:
    class Refusing(Rank):
        async def set_capacity(self, **_: object) -> Capacity:
            raise Unauthenticated("wrong key")

    keeper = keeper_of(Rank(), Refusing())
    with pytest.raises(Unauthenticated):
        await keeper.run()


class World:
    """Agents, a trainer and a network that do at random what they may do."""

    def __init__(self, seed: int, config: RolloutConfig, sizes: tuple[int, ...]) -> None:
        self.random = random.Random(seed)
        self.config = config
        self.sizes = sizes
        self.bad = 0.4
        self.ranks = [Rank(fate=self.fate) for _ in range(3)]
        self.keeper = keeper_of(*self.ranks, config=config)
        self.most = 0

    def fate(self) -> str:
        if self.random.random() > self.bad:
            return "answered"
        return self.random.choice(["lost", "answer lost", "repeated", "hanging"])

    def act(self) -> None:
        rank = self.random.choice(self.ranks)
        match self.random.randrange(10):
            case 0 | 1:
                if len(rank.asked) < 5:
                    rank.ask(self.random.choice(self.sizes))
            case 2 | 3:
                if rank.reserved:
                    rank.reserved -= 1
                    rank.running += 1
            case 4 | 5:
                if rank.running:
                    rank.running -= 1
                    rank.buffered += 1
            case 6:
                self.train()
            case _:
                self.disturb(rank)

    def train(self) -> None:
        if sum(rank.buffered for rank in self.ranks) >= self.config.batch_size:
            left = self.config.batch_size
            for rank in self.ranks:
                taken = min(left, rank.buffered)
                rank.buffered -= taken
                rank.trained += taken
                left -= taken

    def disturb(self, rank: Rank) -> None:
        match self.random.randrange(4):
            case 0 | 1 if rank.late:
                rank.deliver(rank.late.pop(self.random.randrange(len(rank.late))))
            case 2 if not rank.hanging:
                rank.restart()
            case _ if rank.hanging:
                rank.hanging.pop().set()
            case _:
                pass

    def check(self) -> None:
        for rank in self.ranks:
            rank.deliver(Message(0, -1))
        running = sum(rank.running + rank.reserved for rank in self.ranks)
        ahead = running + sum(rank.buffered for rank in self.ranks)
        self.most = max(self.most, ahead)
        bound = (self.config.eta + 1) * self.config.batch_size
        if len(self.sizes) > 1:
            # Where everything stands still with less than a batch, one group is let in.
            bound = max(bound, self.config.batch_size - 1 + max(self.sizes))
        assert ahead <= bound
        assert running <= self.config.max_concurrent


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("eta", "sizes"),
    [(0, (4,)), (0, (1, 2, 4, 8)), (0, (3, 5)), (2, (1, 4, 8))],
    ids=["alike", "mixed", "odd", "ahead"],
)
@pytest.mark.service
async def test_never_too_many_sessions_are_admitted_over_all_ranks(
    monkeypatch: pytest.MonkeyPatch, seed: int, eta: int, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT", 0.001)
    config = RolloutConfig(batch_size=8, max_concurrent=16, eta=eta)
    world = World(seed, config, sizes)
    for _ in range(250):
        for _ in range(world.random.randrange(4)):
            world.act()
            world.check()
        await world.keeper.round()
        await asyncio.sleep(0)
        world.check()
    # And with a network that works everybody who waits is served.
    world.bad = 0.0
    for rank in world.ranks:
        while rank.hanging:
            rank.hanging.pop().set()
    for _ in range(200):
        await world.keeper.round()
        await asyncio.sleep(0)
        world.check()
        if not any(rank.asked for rank in world.ranks):
            break
        for rank in world.ranks:
            rank.buffered += rank.reserved + rank.running
            rank.reserved = rank.running = 0
        world.train()
    else:
        pytest.fail("somebody waits for ever")
    assert world.most >= config.batch_size
