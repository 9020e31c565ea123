"""What sessions say of weights, tokens and rewards, and who is told what first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from any_agent.engine import EnginePool
from any_agent.engine.base import Capabilities
from any_agent.errors import InvalidTrajectory
from any_agent.record import InteractionWithTokenLogpReward
from any_agent.rollout.jobs import JobStream
from any_agent.types import GenerationChunk, ModelRequest
from any_agent.workflow.tensors import rows_of
from tests.support.errors import fails_with
from tests.support.workflow.tensors import tensors
from tests.support.workflow_executor import REJECT, Doing, executor


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


def test_a_reward_that_was_changed_after_the_export_is_the_one_trained_on() -> None:
    exported = {name: value[0] for name, value in tensors([1, 2, 3], reward=1.0).items()}
    one = InteractionWithTokenLogpReward.from_tensors("c", exported)
    one.reward = 0.25
    ((row, _),) = rows_of({"c": one})
    assert (float(row["rewards"]), float(one.to_tensor_dict()["rewards"])) == (0.25, 0.25)


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
