"""Episodes that fail in any way, or whose results cannot be trained on: each costs itself alone."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from any_agent.engine import EnginePool
from any_agent.engine.base import Capabilities
from any_agent.errors import (
    EngineUnavailable,
    InvalidRequest,
    InvalidTrajectory,
    RolloutError,
    ServiceUnavailable,
    TrainingError,
)
from any_agent.rollout import WorkflowExecutor
from any_agent.rollout.failure_budget import is_transient
from any_agent.rollout.jobs import JobStream
from any_agent.types import GenerationChunk, ModelRequest
from any_agent.workflow.tensors import rows_of
from tests.support.errors import fails_with
from tests.support.workflow.tensors import tensors
from tests.support.workflow_executor import REJECT, Doing, executor, items, numbers


async def forever(data: dict[str, Any]) -> None:
    await asyncio.Event().wait()


async def cancels_itself(data: dict[str, Any]) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


async def exits_in_a_task(data: dict[str, Any]) -> None:
    async def end() -> None:
        sys.exit(3)

    await asyncio.create_task(end())


BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "raises": (lambda _: ValueError("it is broken"), "failed"),
    "its own time-out": (lambda _: TimeoutError("a tool took too long"), "failed"),
    "exits": (lambda _: SystemExit(1), "failed"),
    "exits in a task": (exits_in_a_task, "failed"),
    "interrupts": (lambda _: KeyboardInterrupt(), "failed"),
    "cancels itself": (cancels_itself, "failed"),
    "hangs": (forever, "timeout"),
    "returns text": (lambda _: "reward", "invalid"),
    "returns nothing": (lambda _: {}, "invalid"),
    "a wrong shape": (lambda _: tensors([1, 2, 3], rewards=torch.ones(2)), "invalid"),
    "a wrong dtype": (lambda _: tensors([1, 2, 3], loss_mask=torch.ones(1, 3)), "invalid"),
    "a NaN reward": (lambda _: tensors([1, 2, 3], reward=float("nan")), "invalid"),
    "lists": (lambda _: {"input_ids": [[1, 2]], "attention_mask": [[1, 1]]}, "invalid"),
    "no mask": (lambda _: {"input_ids": np.ones((1, 2), np.int32)}, "invalid"),
}


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_episode_costs_itself_alone(bad: str) -> None:
    do, reason = BAD[bad]
    workflow = Doing(lambda data: do(data) if data["n"] == 1 else None)
    with executor(options={"timeout": 2.0}) as e:
        results = e.rollout_batch(items(4), workflow)
        assert [numbers(r) for r in results] == [[0], [2], [3]]
        assert e.rejected == {reason: 1}
        # And so it is for a trainer.
        stream = iter(list(enumerate(items(5))))
        batch = e.sessions_batch(stream, workflow, timeout=60)
    assert [group[0].group_id for group in batch] == ["data-0", "data-2", "data-3", "data-4"]


def test_what_failed_for_good_is_told_as_the_error_of_an_earlier_call() -> None:
    with executor(max_failures=2, max_concurrent=1) as e:
        with fails_with(TrainingError, "2 episodes"):
            e.rollout_batch(items(8), Doing(lambda _: ValueError("it is broken")))
        for ask in (e.rollout_batch, e.prepare_batch):
            with fails_with(TrainingError, "earlier call", "2 episodes"):
                ask(items(2), Doing())


def submit_and_wait(e: WorkflowExecutor, workflow: Doing) -> None:
    for item in items(50):
        e.submit(item, workflow)
    e.wait(50, timeout=60)


@pytest.mark.parametrize(
    "ask",
    [
        submit_and_wait,
        lambda e, workflow: e.rollout_batch(items(50), workflow),
        lambda e, workflow: e.prepare_batch(items(50), workflow, timeout=60),
        lambda e, workflow: e.sessions_batch(enumerate(items(10_000)), workflow, timeout=60),
    ],
    ids=["wait", "rollout_batch", "prepare_batch", "sessions_batch"],
)
def test_an_agent_that_always_fails_ends_the_run(ask: Callable[..., object]) -> None:
    workflow = Doing(lambda _: ValueError("no such tool"))
    with (
        executor(max_failures=8, max_concurrent=4) as e,
        fails_with(TrainingError, "8 episodes", "ValueError: no such tool"),
    ):
        ask(e, workflow)
    assert 8 <= len(workflow.seen) <= 8 + 2 * 4, "those under way at the first failure are free"


def test_a_success_now_and_then_keeps_a_failing_run_alive() -> None:
    workflow = Doing(lambda data: None if data["n"] % 8 == 0 else ValueError("often"))
    with executor(max_failures=8, max_concurrent=1) as e:
        assert len(e.rollout_batch(items(80), workflow)) == 10
    assert e.rejected == {"failed": 70}


def test_a_batch_that_nothing_comes_into_ends() -> None:
    """Otherwise the items of a dataset would be run for ever, in silence."""
    rejects = Doing(lambda _: "reject")
    with (
        executor(max_failures=8) as e,
        fails_with(TrainingError, "8 episodes", "returned None"),
    ):
        e.prepare_batch(items(50), rejects, timeout=60)
    assert 8 <= e.rejected["returned_none"] < 50
    # One that is kept now and then is waited for.
    now_and_then = Doing(lambda data: None if data["n"] == 2 else "reject")
    with executor(max_dull_groups=3, batch_size=2) as e:
        assert len(e.prepare_batch(items(3), now_and_then, timeout=60)) == 2
    with (
        executor(max_dull_groups=3) as e,
        fails_with(RolloutError, "last 3 items", "1 not_accepted"),
    ):
        e.prepare_batch(items(2), Doing(), should_accept_fn=lambda _: False, timeout=60)

    def broken(_: Any) -> bool:
        raise AttributeError("no such field")

    with executor(max_failures=8) as e, fails_with(TrainingError, "no such field"):
        e.prepare_batch(items(50), Doing(), should_accept_fn=broken, timeout=60)
    # Each is right by itself; the group is not.
    more: Iterator[dict[str, Any]] = iter([{}, {"mine": torch.ones(1)}] * 50)
    workflow = Doing(lambda data: tensors([1, 2, data["n"]]) | next(more))
    with executor() as e, fails_with(RolloutError, "6 unusable"):
        e.rollout_batch(items(3), workflow, group_size=2)


def test_evaluations_that_fail_end_nothing() -> None:
    workflow = Doing(lambda _: ValueError("a bad agent"))
    with executor(max_failures=2) as e:
        ids = [e.submit(item, workflow, is_eval=True) for item in items(20)]
        assert [e.wait_for_task(number, timeout=60) for number in ids] == [None] * 20
        assert len(e.rollout_batch(items(4), Doing())) == 4


def test_one_event_that_hits_all_that_runs_ends_nothing() -> None:
    """64 episodes are under way when a proxy dies: they fail, and the next ones do not."""
    dead = asyncio.Event()
    begun = 0

    async def while_it_dies(data: dict[str, Any]) -> None:
        nonlocal begun
        begun += 1
        if begun == 64:
            dead.set()
        if begun <= 64:
            await dead.wait()
            raise ValueError("the connection was lost")

    with executor(max_failures=4, max_concurrent=64, batch_size=64) as e:
        assert len(e.rollout_batch(items(100), Doing(while_it_dies))) == 36
    assert e.rejected == {"failed": 64}


def test_retries_of_a_service_that_is_away_are_spaced_out() -> None:
    """Each try costs an item of the dataset: not one after the other as fast as they fail."""
    begun: list[float] = []

    async def away(data: dict[str, Any]) -> None:
        begun.append(asyncio.get_running_loop().time())
        if len(begun) <= 4:
            raise ServiceUnavailable("the service does not answer")

    with executor(max_failures=20, max_concurrent=1) as e:
        assert len(e.rollout_batch(items(10), Doing(away))) == 6
    pauses = [after - before for before, after in pairwise(begun)]
    for pause, least in zip(pauses, (0.1, 0.2, 0.4, 0.8), strict=False):
        assert pause >= 0.95 * least
    assert len(begun) == 10


class APIConnectionError(Exception):
    """As OpenAI's and Anthropic's."""


class WithStatus(Exception):
    def __init__(self, status: int) -> None:
        self.status_code = status


def test_errors_that_may_pass_are_told_from_lasting_ones() -> None:
    passing = [EngineUnavailable("away"), ConnectionResetError(), httpx.ConnectTimeout("late")]
    passing += [APIConnectionError(), WithStatus(503)]
    lasting = [WithStatus(400), InvalidRequest("too long"), ValueError()]
    assert [one for one in passing + lasting if is_transient(one)] == passing


class Weights:
    """An engine that has them; what is sampled, the tests make up."""

    paused = False

    def __init__(self, version: int) -> None:
        self.version = version

    async def capabilities(self) -> Capabilities:
        return Capabilities()

    async def generate(
        self, request: ModelRequest, *, stream: bool = True
    ) -> AsyncGenerator[GenerationChunk]:
        raise NotImplementedError
        yield

    async def pause(self) -> None: ...

    async def resume(self, version: int) -> None:
        self.version = version


def sampled_by(version: int) -> Doing:
    def episode(data: dict[str, Any]) -> Any:
        result = tensors([1, 2, data["n"]])
        result["versions"][result["loss_mask"] == 1] = version
        return result

    return Doing(episode)


def batch_of(engines: list[Weights], version: int, *, told: int, coming: int | None = None) -> Any:
    """Sessions whose tokens are all of ``version``; and why others were left out."""
    with executor(EnginePool(engines), batch_size=1) as e:
        e.release(told)
        if coming is not None:
            e.hold(coming)
        stream = iter([(0, {"n": 7})])
        return e.sessions_batch(stream, sampled_by(version), timeout=60), dict(e.rejected)


def test_a_version_that_no_rank_was_told_of_is_refused() -> None:
    assert batch_of([Weights(5)], 6, told=5) == ([], {"invalid": 1})
    # One engine came back with old weights: the others are not wrong.
    batch, rejected = batch_of([Weights(0), Weights(5)], 5, told=5)
    assert (len(batch), rejected) == (1, {})
    # A trainer that died while it published has used up the version in between.
    batch, rejected = batch_of([Weights(5)], 8, told=5, coming=8)
    assert (len(batch), rejected) == (1, {})


def test_a_token_that_the_model_does_not_know_costs_its_session_alone() -> None:
    """Trained on, it would end the training, and every one after it."""
    with executor(batch_size=1, options={"vocab_size": 100}) as e:
        stream = iter([(n, {"n": n}) for n in (100, 99)])
        ((session,),) = e.sessions_batch(stream, Doing(), timeout=60)
        assert (session.session_id, dict(e.rejected)) == ("data-99-0", {"invalid": 1})
    with fails_with(InvalidTrajectory, "token id 100"):
        rows_of(tensors([1, 2, 100]), vocab_size=100)


def test_a_rejected_last_item_is_reported_before_the_batch_ends() -> None:
    told: list[int] = []

    def slowly(position: int, why: str) -> None:
        time.sleep(0.2)
        told.append(position)

    with executor(batch_size=1) as e:
        stream = iter([(0, {"n": 0})])
        workflow = Doing(lambda data: REJECT)
        assert e.sessions_batch(stream, workflow, on_rejected=slowly, timeout=60) == []
        assert told == [0]


def test_an_item_is_under_way_before_it_is_no_longer_waiting() -> None:
    """Another thread asks at any moment whether all is over."""
    over: list[bool] = []

    class Asked(deque[Any]):
        def popleft(self) -> Any:
            item = super().popleft()
            over.append(stream.ended())
            return item

    stream = JobStream(iter(()), Doing(), 1, 1, exhausted=True, waiting=Asked([(0, {})]))
    assert stream.next_job().position == 0
    assert (over, stream.running_jobs) == ([False], 1)
