from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from any_agent import workflow_context
from any_agent.errors import InvalidTrajectory
from any_agent.record import InteractionTree, InteractionWithTokenLogpReward
from any_agent.types import Trajectory
from any_agent.workflow import EpisodeResult, GroupedRolloutWorkflow, RolloutWorkflow
from tests.support.errors import fails_with
from tests.support.waiting import until
from tests.support.workflow.tensors import interaction, tensors


class Counted(RolloutWorkflow):
    """Each run answers by its number; runs meet before any of them ends."""

    def __init__(self, answer: Callable[[int], Any], size: int) -> None:
        self.answer = answer
        self.started = self.cancelled = 0
        self.meet = asyncio.Barrier(size)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult | None:
        number = self.started
        self.started += 1
        try:
            await self.meet.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        result = self.answer(number)
        if isinstance(result, Exception):
            raise result
        return result


async def run(answer: Callable[[int], Any], size: int = 4) -> Any:
    workflow = Counted(answer, size)
    return await GroupedRolloutWorkflow(workflow, size).arun_episode(None, {})


def exported(id: str) -> dict[str, InteractionWithTokenLogpReward]:
    tree = InteractionTree.from_interactions([interaction(id, [1], [2])])
    return InteractionWithTokenLogpReward.of_tree(tree, {id: 1.0}, "individual")


async def test_results_of_runs_side_by_side_are_joined() -> None:
    merged = await run(lambda k: tensors(list(range(1, 4 + k)), reward=float(k)))
    assert merged["input_ids"].shape == (4, 6)
    assert sorted(merged["rewards"].tolist()) == [0, 1, 2, 3]
    assert merged["attention_mask"].sum(1).tolist() == [3, 4, 5, 6]
    assert sorted(await run(lambda k: exported(f"i{k}"))) == ["i0", "i1", "i2", "i3"]
    joined = await run(lambda k: [Trajectory(f"s{k}", "g", [])])
    assert [t.session_id for t in joined] == ["s0", "s1", "s2", "s3"]
    merged = await run(lambda k: tensors([1, 2, 3]) if k else exported("i"))
    assert merged["input_ids"].shape == (4, 3), "results of two kinds become tensors"
    assert not merged["cut"].any(), "and where no end is known, none was cut off"
    with fails_with(InvalidTrajectory, "'same'"):
        await run(lambda _: exported("same"))


async def test_rejected_runs_are_dropped() -> None:
    merged = await run(lambda k: tensors([1, 2, 3]) if k % 2 else None)
    assert merged["input_ids"].shape == (2, 3)
    assert await run(lambda _: None) is None


async def test_a_failed_run_costs_itself_alone() -> None:
    failure = ValueError("broken")
    merged = await run(lambda k: failure if k == 0 else tensors([1, 2, 3]))
    assert merged["input_ids"].shape == (3, 3)
    with fails_with(ValueError, "broken 1"):
        await run(lambda k: ValueError(f"broken {k}") if k else None)
    results = [failure, None, tensors([1, 2, 3])]
    group = GroupedRolloutWorkflow(Counted(lambda k: results[k], 3), 3)
    assert await group.arun_members(None, {}) == results


async def test_an_agent_that_exits_ends_its_own_run_alone() -> None:
    merged = await run(lambda k: tensors([1, 2, 3]) if k else exit(3))
    assert merged["input_ids"].shape == (3, 3)
    with fails_with(RuntimeError, "SystemExit"):
        await run(lambda _: exit(3), 1)


async def test_cancelling_a_group_cancels_all_its_runs() -> None:
    workflow = Counted(lambda _: None, 5)
    task = asyncio.create_task(GroupedRolloutWorkflow(workflow, 4).arun_episode(None, {}))
    await until(lambda: workflow.started == 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert workflow.cancelled == 4
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_each_run_has_its_own_data_and_the_episodes_context() -> None:
    class Changing(RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> EpisodeResult | None:
            assert "seen" not in data
            data["seen"] = True
            await asyncio.sleep(0)
            assert workflow_context.get().task_id == 7
            return None

    with workflow_context.use(workflow_context.WorkflowContext(task_id=7)):
        await GroupedRolloutWorkflow(Changing(), 3).arun_episode(None, {})


def test_a_size_that_is_none_is_refused() -> None:
    for size in (0, -1, 1.5):
        with fails_with(ValueError, "group_size"):
            GroupedRolloutWorkflow(Counted(lambda _: None, 1), size)
