"""The seeds of workflows' calls in runs that are repeated bit for bit."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from any_agent import MultiTurnWorkflow, RLVRWorkflow
from any_agent.engine import EnginePool
from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.runtime import worker_pool as workers
from any_agent.types import GenerationChunk, GenerationHyperparameters, ModelRequest
from any_agent.workflow import RolloutWorkflow
from tests.support import reward_functions as functions
from tests.support.workflow.tensors import tensors
from tests.support.workflow_executor import executor

SAMPLING = GenerationHyperparameters(max_new_tokens=12, temperature=1.0)
ITEM = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"}


def sampled(model: Path, workflow: RolloutWorkflow, **config: Any) -> list[list[list[int]]]:
    """The ids of each run of two groups, by an engine of their own."""
    pool = EnginePool([EmbeddedEngine.load(str(model))])
    items = iter([(0, ITEM), (1, ITEM)])
    with executor(pool, eta=0, **config) as e:
        groups = e.sessions_batch(items, workflow, group_size=2, timeout=60)
    # Its processes end with the executor's thread, which started them.
    workers.shared_pool("rewards", 1).close()
    return [[row["input_ids"].tolist() for row in run.rows] for group in groups for run in group]


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.service
def test_the_same_runs_again(tiny_model_dir: Path, turns: int) -> None:
    workflow: RolloutWorkflow = RLVRWorkflow(functions.never, SAMPLING, str(tiny_model_dir))
    if turns > 1:
        workflow = MultiTurnWorkflow(
            functions.never, SAMPLING, str(tiny_model_dir), max_turns=turns, turn_discount=1.0
        )
    first = sampled(tiny_model_dir, workflow, deterministic=True)
    assert len({str(run) for run in first}) == 4, "no two runs are the same"
    assert sampled(tiny_model_dir, workflow, deterministic=True) == first
    assert sampled(tiny_model_dir, workflow, deterministic=True, options={"seed": 1}) != first
    assert sampled(tiny_model_dir, workflow) != first


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


def test_each_call_has_its_own() -> None:
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
