"""The seeds of workflows' calls in runs that are repeated bit for bit."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from any_agent.engine import EnginePool
from any_agent.types import GenerationChunk, GenerationHyperparameters, ModelRequest
from any_agent.workflow import RolloutWorkflow
from tests.support.workflow.tensors import tensors
from tests.support.workflow_executor import executor

SAMPLING = GenerationHyperparameters(max_new_tokens=12, temperature=1.0)
ITEM = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}


class Remembering:
    """An engine that keeps the seeds of its requests."""

    version = 0

    def __init__(self) -> None:
        self.seeds: list[int | None] = []

    async def generate(
        self, request: ModelRequest, *, stream: bool = True
    ) -> AsyncGenerator[GenerationChunk]:
        self.seeds.append(request.gconfig.seed)
        yield GenerationChunk([7], [-1.0], [0], "length")


class Calls(RolloutWorkflow):
    """Calls the engine twice, by both of its methods, and once with a seed of its own."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        request = ModelRequest(rid="r", input_ids=[5], gconfig=SAMPLING)
        await engine.agenerate(request)
        _ = [chunk async for chunk in engine.generate(request)]
        own = ModelRequest(rid="r", input_ids=[5], gconfig=SAMPLING.new(seed=77))
        await engine.agenerate(own)
        return tensors([1, 2, 3])


def seeds(*, is_eval: bool = False, **config: Any) -> list[int | None]:
    engine: Any = Remembering()
    with executor(EnginePool([engine]), **config) as e:
        for task in range(2):
            e.submit(ITEM, Calls(), task_id=task, is_eval=is_eval, group_size=2)
        e.wait(2, timeout=60)
    return sorted(engine.seeds, key=str)


def test_each_call_of_a_deterministic_run_has_its_own_seed() -> None:
    train, judged = seeds(deterministic=True), seeds(deterministic=True, is_eval=True)
    for found in (train, judged):
        # Two items, two runs, three calls.
        assert len(set(found)) == 12 and not {None, 77} & set(found)
    assert not set(train) & set(judged)
    assert seeds(deterministic=True) == train
    assert len(set(seeds(deterministic=True, options={"seed": 1})) & set(train)) == 4


def test_a_seed_of_a_call_makes_no_samples_equal() -> None:
    """Equal samples of a group would have no advantages."""
    found = seeds()
    assert len(set(found) - {None, 77}) == 4 and found.count(None) == 8
    assert seeds() == found
