"""What was submitted and is not wanted any more, such as an evaluation that takes too long."""

from __future__ import annotations

import pytest

from tests.support.errors import fails_with
from tests.support.workflow_executor import Gated, executor, items, numbers, until


@pytest.mark.parametrize("is_eval", [True, False])
def test_what_runs_and_what_waits_are_both_forgotten(is_eval: bool) -> None:
    workflow = Gated()
    with executor(max_concurrent=2, batch_size=2, eta=0) as e:
        ids = [e.submit(item, workflow, is_eval=is_eval) for item in items(5)]
        kept = e.submit({"n": 9}, workflow, is_eval=is_eval)
        until(lambda: workflow.waiting == [0, 1])
        workflow.let(0)
        assert e.wait_for_task(ids[0], timeout=60) is not None
        until(lambda: 1 in workflow.waiting)
        e.drop([*ids, 1234])
        assert set(workflow.cancelled) >= {1}
        workflow.let(9)
        result = e.wait_for_task(kept, timeout=60)
        assert result is not None and numbers(result) == [9]
        assert e.rejected == {}, "what was dropped has not failed"
        assert e.capacity.running == 0
        with fails_with(ValueError, f"task_id {ids[1]}"):
            e.wait_for_task(ids[1], timeout=1)
        e.submit({"n": 3}, workflow, task_id=ids[1], is_eval=is_eval)


def test_what_has_ended_is_forgotten() -> None:
    workflow = Gated()
    with executor(max_concurrent=4, batch_size=4, eta=0) as e:
        (first, second) = (e.submit({"n": n}, workflow, group_size=2) for n in (0, 1))
        until(lambda: workflow.waiting == [0, 0, 1, 1])
        gate = workflow._gates[0].pop()
        gate.get_loop().call_soon_threadsafe(gate.set_result, None)
        until(lambda: e.capacity.buffered == 1)
        e.drop([first])
        assert (e.capacity.running, e.capacity.buffered) == (2, 0)
        workflow.let(1)
        until(lambda: e.capacity.buffered == 2)
        e.drop([second])
        # There is room for as many again.
        again = e.submit({"n": 5}, workflow, group_size=4)
        until(lambda: workflow.waiting == [5] * 4)
        workflow.let(5)
        assert e.wait_for_task(again, timeout=60) is not None
