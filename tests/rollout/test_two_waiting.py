"""Two threads that wait for the same items: one has the results, the other is told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.errors import fails_with
from tests.support.workflow_executor import LIMIT, Gated, executor, items, numbers


def results(*futures: Future[Any]) -> tuple[list[Any], list[BaseException]]:
    errors = [error for f in futures if (error := f.exception(LIMIT)) is not None]
    return [f.result() for f in futures if f.exception() is None], errors


@pytest.mark.parametrize("asked", ["wait_for_task", "wait_for_runs"])
def test_of_two_who_wait_for_one_item_one_gets_it(asked: str) -> None:
    flow = Gated()
    with executor() as e, ThreadPoolExecutor(2) as threads:
        ask: Callable[[int], Any] = getattr(e, asked)
        task = e.submit({"n": 7}, flow)
        futures = [threads.submit(ask, task) for _ in range(2)]
        flow.let(7)
        got, errors = results(*futures)
    assert len(got) == 1
    assert [str(error) for error in errors] == [
        "task_id 0 was not submitted, or waited for already"
    ]
    assert isinstance(errors[0], ValueError)


def test_of_two_who_wait_for_more_than_there_is_one_is_told() -> None:
    """Of four that were submitted each of two threads wants three."""
    flow = Gated()
    with executor() as e, ThreadPoolExecutor(2) as threads:
        for item in items(4):
            e.submit(item, flow)
        futures = [threads.submit(e.wait, 3) for _ in range(2)]
        flow.let(0, 1, 2, 3)
        (got,), (error,) = results(*futures)
        (last,) = e.wait(1, LIMIT)
    assert sorted(n for one in [*got, last] for n in numbers(one)) == [0, 1, 2, 3]
    assert "3 items" in str(error)


def test_a_batch_that_another_thread_takes_from() -> None:
    flow = Gated()
    with executor() as e, ThreadPoolExecutor(1) as threads:
        future = threads.submit(e.rollout_batch, items(3), flow)
        flow.let(1)
        assert e.wait(1, LIMIT) != [None]
        flow.let(0, 2)
        with fails_with(ValueError, "another thread"):
            future.result(LIMIT)
