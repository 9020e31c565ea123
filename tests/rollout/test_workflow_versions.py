"""What sessions say of the weights that sampled them, while engines have different ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from any_agent.engine import EnginePool
from any_agent.engine.base import Capabilities
from any_agent.types import GenerationChunk, ModelRequest
from tests.rollout.workflow_lab import Doing, executor
from tests.workflow.tensors_lab import tensors


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
        return e.sessions_batch(stream, sampled_by(version), timeout=20), dict(e.rejected)


def test_an_engine_that_came_back_with_old_weights_does_not_make_the_others_wrong() -> None:
    batch, rejected = batch_of([Weights(0), Weights(5)], 5, told=5)
    assert (len(batch), rejected) == (1, {})


def test_the_version_that_is_on_its_way_may_be_some_further_than_the_next() -> None:
    """A trainer that died while it published has used up the one in between."""
    batch, rejected = batch_of([Weights(5)], 8, told=5, coming=8)
    assert (len(batch), rejected) == (1, {})


def test_what_nobody_was_told_of_is_refused() -> None:
    assert batch_of([Weights(5)], 6, told=5) == ([], {"invalid": 1})
