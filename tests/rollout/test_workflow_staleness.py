"""How far episodes run ahead of the trainer, whatever the order in which they end."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.config import RolloutConfig
from any_agent.record import InteractionWithTokenLogpReward
from any_agent.rollout.episode_runner import EpisodeRunner
from any_agent.rollout.episode_scheduler import EpisodeScheduler
from any_agent.rollout.jobs import EpisodeJob, JobQueue, JobStream
from any_agent.workflow import RolloutWorkflow

ITEMS = 24


@dataclass
class Run:
    position: int
    begun_at: int
    """The trainer's step."""
    end: asyncio.Future[str]


def result() -> dict[str, InteractionWithTokenLogpReward]:
    values = {
        "input_ids": [1, 2, 3],
        "attention_mask": [True] * 3,
        "loss_mask": [0, 0, 1],
        "logprobs": [0.0, 0.0, -0.5],
        "versions": [-1, -1, 0],
        "rewards": 1.0,
    }
    return {"i": InteractionWithTokenLogpReward.from_tensors("i", values)}


class Controlled(RolloutWorkflow):
    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        run = Run(data["n"], self._bench.step, asyncio.get_running_loop().create_future())
        self._bench.running.append(run)
        how = await run.end
        self._bench.running.remove(run)
        if how == "fails":
            raise ValueError("it failed")
        return None if how == "rejected" else result()


@dataclass
class Bench:
    """A scheduler whose episodes end on a test's call, and the trainer that takes its batches."""

    config: RolloutConfig
    group_size: int
    step: int = 0
    running: list[Run] = field(default_factory=list)
    begun: dict[int, int] = field(default_factory=dict)
    """The step at which an item's runs began."""
    ended: dict[int, int] = field(default_factory=dict)
    trained: list[tuple[int, int]] = field(default_factory=list)
    """Positions and the steps that took them."""
    dropped: list[int] = field(default_factory=list)
    in_training: list[EpisodeJob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue = JobQueue()
        episodes = EpisodeRunner(
            engine=None,
            version=lambda: self.step,
            sampling=None,
            eval_sampling=None,
            timeout=None,
            discount=1.0,
        )
        self.scheduler = EpisodeScheduler(episodes, self.config, self.queue)
        self.stream = JobStream(
            ((n, {"n": n}) for n in range(ITEMS)),
            Controlled(self),
            self.group_size,
            self.config.batch_size,
            sessions=True,
            on_rejected=lambda position, _: self.dropped.append(position),
        )

    @property
    def ahead(self) -> int:
        now = self.scheduler.counts.capacity()
        return now.running + now.buffered

    async def settle_down(self) -> None:
        """Until nothing happens any more by itself."""
        for _ in range(4):
            await asyncio.sleep(0)
        while self.stream.pulling:  # noqa: ASYNC110  (a thread does it)
            await asyncio.sleep(0.0002)
        for _ in range(4):
            await asyncio.sleep(0)
        for run in self.running:
            self.begun.setdefault(run.position, run.begun_at)

    async def end(self, which: int, how: str, *, whole: bool) -> None:
        """One run, or all of its item."""
        chosen = self.running[which % len(self.running)]
        for run in list(self.running):
            if run is chosen or (whole and run.position == chosen.position):
                run.end.set_result(how)
        self.ended[chosen.position] = self.step
        await self.settle_down()

    def take(self) -> bool:
        """A batch, if one is whole and none is in training."""
        if self.in_training or not (self.stream.batch_ready() or self.stream.ended()):
            return False
        self.in_training = self.stream.pop_batch()
        self.trained += [(job.position, self.step) for job in self.in_training]
        return bool(self.in_training)

    async def publish(self) -> None:
        """The weights of the batch in training are everywhere."""
        sessions = sum(len(job.results) for job in self.in_training)
        self.in_training = []
        self.step += 1
        self.scheduler.settle(sessions)
        await self.settle_down()

    def check(self, *, overshoot: int) -> None:
        c = self.config
        assert len(self.running) <= c.max_concurrent
        assert self.ahead <= (c.eta + 1) * c.batch_size + overshoot
        assert self.scheduler.counts.running >= len(self.running)
        assert not self.queue.failed

    async def finish(self) -> None:
        """Everything ends, and is taken: nothing waits for what will not come."""
        while self.running or self.in_training or not self.stream.ended() or self.stream.ready:
            if self.in_training:
                await self.publish()
            elif self.running:
                await self.end(0, "ok", whole=True)
            else:
                assert self.take(), "nothing runs, and no batch is whole"
        done = [position for position, _ in self.trained] + self.dropped
        assert Counter(done) == Counter(range(ITEMS))


sizes = st.fixed_dictionaries(
    {
        "eta": st.integers(0, 3),
        "group_size": st.integers(1, 4),
        "batch_groups": st.integers(1, 3),
        "max_concurrent": st.integers(1, 16),
    }
)
actions = st.lists(
    st.tuples(
        st.integers(0, 30), st.sampled_from(["ok", "ok", "ok", "rejected", "fails", "publish"])
    ),
    max_size=40,
)


def bench_of(size: dict[str, int], batch_size: int) -> Bench:
    config = RolloutConfig(  # type: ignore[call-arg]
        batch_size=batch_size,
        max_concurrent=size["max_concurrent"],
        eta=size["eta"],
        max_failures=10_000,
    )
    return Bench(config, size["group_size"])


async def play(
    bench: Bench, actions: list[tuple[int, str]], *, whole: bool, overshoot: int, fifo: bool = False
) -> None:
    bench.scheduler.open_stream(bench.stream)
    await bench.settle_down()
    for which, what in actions:
        if what == "publish":
            if bench.in_training:
                await bench.publish()
            else:
                bench.take()
        elif bench.running:
            await bench.end(0 if fifo else which, what, whole=whole)
        bench.check(overshoot=overshoot)
    await bench.finish()
    await bench.scheduler.stop()


@given(sizes, actions)
@settings(max_examples=30, deadline=None)
def test_no_session_waits_longer_than_eta_steps(
    size: dict[str, int], actions: list[tuple[int, str]]
) -> None:
    """Whatever the order: from its end on a session is trained on within eta steps."""
    bench = bench_of(size, size["group_size"] * size["batch_groups"])
    asyncio.run(play(bench, actions, whole=True, overshoot=0))
    for position, step in bench.trained:
        assert step - bench.ended[position] <= size["eta"]


@given(sizes, actions)
@settings(max_examples=30, deadline=None)
def test_sessions_that_end_in_their_order_are_at_most_eta_steps_old(
    size: dict[str, int], actions: list[tuple[int, str]]
) -> None:
    bench = bench_of(size, size["group_size"] * size["batch_groups"])
    asyncio.run(play(bench, actions, whole=True, overshoot=0, fifo=True))
    for position, step in bench.trained:
        assert step - bench.begun[position] <= size["eta"]


@given(sizes, actions, st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_groups_that_do_not_fill_a_batch_never_stop_the_rollout(
    size: dict[str, int], actions: list[tuple[int, str]], more: int
) -> None:
    """Members are lost one by one, and batches are no multiple of groups: it never stands still."""
    bench = bench_of(size, size["group_size"] * size["batch_groups"] + more)
    asyncio.run(play(bench, actions, whole=False, overshoot=size["group_size"] - 1))


@pytest.mark.parametrize("eta", [0, 2])
def test_episodes_run_ahead_by_eta_plus_one_batches_and_no_more(eta: int) -> None:
    """A trainer that never comes back for more."""

    async def run() -> int:
        bench = bench_of({"eta": eta, "group_size": 2, "max_concurrent": 3}, 4)
        bench.scheduler.open_stream(bench.stream)
        await bench.settle_down()
        while bench.running:
            await bench.end(0, "ok", whole=True)
        assert bench.take()
        await bench.settle_down()
        await bench.scheduler.stop()
        return len(bench.ended)

    assert asyncio.run(run()) == 2 * (eta + 1)
