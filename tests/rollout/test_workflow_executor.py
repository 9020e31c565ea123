"""The executor as scripts use it: submit and wait, batches, pauses, cancellation."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import pytest

from any_agent.config import RolloutConfig
from any_agent.data import ItemLoader
from any_agent.engine import EnginePool
from any_agent.errors import ConfigError, RolloutError, TooManyRequests, TrainingError
from any_agent.rollout import WorkflowExecutor
from any_agent.types import GenerationChunk, GenerationHyperparameters, ModelRequest
from any_agent.workflow import GroupedRolloutWorkflow, RolloutWorkflow, context
from tests.support.errors import fails_with
from tests.support.workflow.tensors import tensors
from tests.support.workflow_executor import (
    LIMIT,
    REJECT,
    Doing,
    Gated,
    executor,
    items,
    numbers,
    until,
)

THIRD = Doing(lambda data: REJECT if data["n"] % 3 == 0 else None)


def test_wait_returns_every_submitted_item_and_none_for_rejected_ones() -> None:
    with executor() as e:
        ids = [e.submit(item, THIRD) for item in items(6)]
        assert len(set(ids)) == 6
        results = e.wait(6, timeout=60)
        assert [r and numbers(r) for r in results] == [None, [1], [2], None, [4], [5]]
        assert e.rejected == {"returned_none": 2}
        for item in items(4):
            e.submit(item, Doing(), should_accept_fn=lambda t: numbers(t)[0] % 2 == 1, group_size=2)
        results = e.wait(4, timeout=60)
        assert [r and numbers(r) for r in results] == [None, [1, 1], None, [3, 3]]
        assert e.rejected == {"returned_none": 2, "not_accepted": 4}
        # A workflow that makes groups itself makes more.
        e.submit({"n": 7}, GroupedRolloutWorkflow(Doing(), 3), group_size=2)
        (grouped,) = e.wait(1, timeout=60)
        assert grouped is not None and grouped["input_ids"].shape == (6, 3)


def test_finished_items_come_first_in_the_order_of_their_submission() -> None:
    workflow = Gated()
    with executor() as e:
        ids = [e.submit(item, workflow) for item in items(4)]
        workflow.let(2, 1)
        assert [numbers(r) for r in e.wait(2, timeout=60) if r] == [[1], [2]]
        workflow.let(3)
        result = e.wait_for_task(ids[3], timeout=60)
        assert result is not None
        assert numbers(result) == [3]
        with fails_with(TimeoutError, "0 of 1"):
            e.wait(1, timeout=0.05)
        assert e.wait(1, timeout=0.05, raise_timeout=False) == []
        assert e.wait_for_task(ids[0], timeout=0.05, raise_timeout=False) is None
        with fails_with(TimeoutError, f"task {ids[0]}", "0.05 s"):
            e.wait_for_task(ids[0], timeout=0.05)
        workflow.let(0)
        assert e.wait_for_task(ids[0], timeout=60) is not None


def test_ids_of_ones_own_are_kept_apart_from_given_ones() -> None:
    with executor() as e:
        assert e.submit({"n": 1}, Doing(), task_id=1) == 1
        assert e.submit({"n": 2}, Doing()) == 0
        assert e.submit({"n": 3}, Doing()) == 2, "1 is taken"
        with fails_with(ValueError, "task_id 1"):
            e.submit({"n": 4}, Doing(), task_id=1)
        assert e.wait_for_task(1, timeout=60) is not None
        for unknown in (1, 99):
            with fails_with(ValueError, "task_id"):
                e.wait_for_task(unknown)
        for count in (3, 0):
            with pytest.raises(ValueError):
                e.wait(count)


def test_more_than_training_looks_ahead_may_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacity is 4 sessions; a wait for more would otherwise never end."""
    monkeypatch.setattr("any_agent.rollout.workflow_executor.MAX_SUBMITTED", 30)
    workflow = Doing()
    with executor(eta=0) as e:
        for item in items(30):
            e.submit(item, workflow, group_size=2)
        with fails_with(TooManyRequests, "30 items"):
            e.submit({"n": 30}, workflow)
        until(lambda: len(workflow.seen) >= 4)
        time.sleep(0.1)
        assert len(workflow.seen) == 4, "nobody waits: no more than one batch"
        assert len(e.wait(30, timeout=60)) == 30
        e.submit({"n": 0}, workflow, group_size=2)
        assert len(e.wait(1, timeout=60)) == 1


def test_a_rollout_batch_keeps_the_order_of_its_items() -> None:
    async def think(data: dict[str, Any]) -> Any:
        await asyncio.sleep(0.001)
        return REJECT if data["n"] == 5 else None

    workflow = Doing(think)
    with executor(batch_size=2, max_concurrent=4, eta=0) as e:
        results = e.rollout_batch(items(20), workflow, group_size=2)
        assert [numbers(r)[0] for r in results] == [n for n in range(20) if n != 5]
        assert all(len(numbers(r)) == 2 for r in results)
        assert workflow.most == 4
        with fails_with(ValueError, "dataset"):
            e.rollout_batch([], workflow)
        assert len(e.rollout_batch(items(3), workflow)) == 3


def test_batches_begin_the_loader_anew_at_its_end() -> None:
    class Loader:
        """As one of torch whose `collate_fn` returns its items."""

        batch_size = 4

        def __iter__(self) -> Iterator[list[dict[str, Any]]]:
            yield from (items(4), items(6)[4:])

    loader, workflow = Loader(), Doing(lambda data: REJECT if data["n"] == 2 else None)
    with executor() as e:
        taken = [
            n
            for _ in range(4)
            for result in e.prepare_batch(loader, workflow, group_size=2, timeout=60)
            for n in set(numbers(result))
        ]
    assert taken == [0, 1, 3, 4, 5] * 3 + [0]
    with executor(batch_size=6) as e:
        batch = e.prepare_batch(items(10), Doing(), group_size=2, timeout=60)
    assert [numbers(r) for r in batch] == [[0, 0], [1, 1], [2, 2]], "without a size: sessions"


def test_a_loader_continues_after_what_was_returned() -> None:
    """Episodes that ran ahead of the last batch, of a script that then ended, run again."""
    data = items(24)
    odd = Doing(lambda item: REJECT if item["n"] in (2, 9) else None)
    loader = ItemLoader(data, 4, shuffle=False)
    with executor(eta=2) as e:
        first = [numbers(r) for _ in range(2) for r in e.prepare_batch(loader, odd, timeout=60)]
        until(lambda: e.capacity.buffered == 12)
        state = json.loads(json.dumps(loader.state_dict()))
    assert first == [[0], [1], [3], [4], [5], [6], [7], [8]]
    assert (state["low"], state["beyond"]) == (10, [])
    again = ItemLoader(data, 4, shuffle=False)
    again.load_state_dict(state)
    with executor(eta=2) as e:
        rest = [numbers(r) for _ in range(4) for r in e.prepare_batch(again, odd, timeout=60)]
    # The second pass follows the first.
    assert rest == [[n] for n in (*range(10, 24), 0, 1)]


def test_a_loaders_items_come_again_where_their_batch_broke() -> None:
    loader, workflow = ItemLoader(items(8), 4, shuffle=False), Doing()
    broken = threading.Event()
    with executor(max_dull_groups=2) as e:

        async def two_in_a_row(item: dict[str, Any]) -> Any:
            """Once there is a result of the first; the others end later."""
            rejected = item["n"] in (1, 2)
            ready = (lambda: e.capacity.buffered) if rejected else broken.is_set
            while item["n"] and not ready():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            return REJECT if rejected else None

        with fails_with(RolloutError, "2 items"):
            e.prepare_batch(loader, Doing(two_in_a_row))
        broken.set()
        assert loader.state_dict()["beyond"] == [1, 2]
        batch = e.prepare_batch(loader, workflow, timeout=60)
    assert [numbers(r) for r in batch] == [[0], [3], [4], [5]]


def test_the_next_batch_is_sampled_while_the_trainer_works() -> None:
    workflow = Doing()
    data = items(100)
    with executor(batch_size=4, eta=1) as e:
        e.prepare_batch(data, workflow, timeout=60)
        until(lambda: len(workflow.seen) == 8)
        time.sleep(0.05)
        assert len(workflow.seen) == 8, "one step ahead, and not more"
        assert e.capacity.running + e.capacity.buffered == 8
        e.prepare_batch(data, workflow, timeout=60)
        until(lambda: len(workflow.seen) == 12)


def test_an_executor_keeps_to_its_loader_and_workflow() -> None:
    data, workflow = items(10), Doing()
    with executor() as e:
        with pytest.raises(ConfigError):
            e.submit({"n": 0}, workflow, group_size=0)
        with pytest.raises(ConfigError):
            e.prepare_batch(data, workflow, group_size=5)
        e.prepare_batch(data, workflow, timeout=60)
        for loader, other, size in (
            (items(10), workflow, 1),
            (data, Doing(), 1),
            (data, workflow, 2),
        ):
            with pytest.raises(ConfigError):
                e.prepare_batch(loader, other, group_size=size)
        assert e.prepare_batch(data, workflow, timeout=60)
    for wrong, error in (
        (["text"], TypeError),
        ([["text"]], TypeError),
        (iter(items(2)), ValueError),
    ):
        with executor() as e, pytest.raises(error):
            e.prepare_batch(wrong, Doing(), timeout=60)  # type: ignore[arg-type]
            e.prepare_batch(wrong, Doing(), timeout=60)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError("no disk"), OSError), (TimeoutError("no disk"), TrainingError)],
)
def test_a_call_that_fails_fails_alone(error: Exception, kind: type[Exception]) -> None:
    class Breaking:
        """Its first pass breaks behind six items, the next ones do not."""

        errors: ClassVar = [error]

        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from items(6)
            for error in self.errors:
                self.errors.clear()
                raise error

    loader, workflow = Breaking(), Doing()
    with executor() as e:
        with fails_with(kind, "no disk"):
            e.prepare_batch(loader, workflow, timeout=60)
        batch = e.prepare_batch(loader, workflow, timeout=60)
        assert [numbers(r) for r in batch] == [[0], [1], [2], [3]]
    with executor(max_dull_groups=3) as e:
        for _ in range(2):
            with pytest.raises(ValueError):
                e.prepare_batch([], Doing(), timeout=60)
        with fails_with(RolloutError, "3 items"):
            e.prepare_batch(items(4), Doing(lambda _: REJECT), timeout=60)
        assert len(e.prepare_batch(items(4), Doing(), timeout=60)) == 4


def test_a_slow_loader_stops_no_episode() -> None:
    free = threading.Event()

    class Slow:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            yield from items(1)
            assert free.wait(60)
            yield from items(8)

    loader, workflow = Slow(), Doing()
    with executor() as e:
        with fails_with(TimeoutError, "0 of 4"):
            e.prepare_batch(loader, workflow, timeout=0.1)
        e.submit({"n": 50}, workflow)
        assert e.wait(1, timeout=60)[0] is not None
        free.set()
        assert len(e.prepare_batch(loader, workflow, timeout=60)) == 4


def test_a_batch_is_whole_groups_without_the_rejected_ones() -> None:
    dropped: list[tuple[int, str]] = []

    def twos(data: dict[str, Any]) -> Any:
        return tensors([1, 2, 3], [1, 2, 4, 5], reward=0.5) if data["n"] else REJECT

    with executor() as e:
        stream = iter([(10 + n, item | {"task_id": f"t{n}"}) for n, item in enumerate(items(7))])
        batches = []
        while batch := e.sessions_batch(
            stream,
            Doing(twos),
            group_size=2,
            reject=lambda group: "dull" if group[0].task_id == "t3" else None,
            on_rejected=lambda position, why: dropped.append((position, why)),
            timeout=60,
        ):
            batches.append([[s.session_id for s in group] for group in batch])
            (first, *_), *_ = batch
            e.settled([group[0].group_id for group in batch])
    assert batches == [
        [["data-11-0", "data-11-1"], ["data-12-0", "data-12-1"]],
        [["data-14-0", "data-14-1"], ["data-15-0", "data-15-1"]],
        [["data-16-0", "data-16-1"]],
    ]
    assert dropped == [(10, "returned_none"), (13, "dull")]
    assert e.rejected == {"returned_none": 2, "dull": 2}
    assert first.task_id == "t6"
    assert [row["input_ids"].tolist() for row in first.rows] == [[1, 2, 3], [1, 2, 4, 5]]
    assert first.temperatures == [None, None]
    assert e.capacity.buffered == 0


def test_a_batch_is_buffered_until_it_is_settled() -> None:
    workflow = Doing()
    stream = iter(list(enumerate(items(100))))
    with executor(eta=0) as e:
        (one, *others) = e.sessions_batch(stream, workflow, timeout=60)
        time.sleep(0.05)
        assert len(workflow.seen) == 4
        with fails_with(TimeoutError, "0 of 4"):
            e.sessions_batch(stream, workflow, timeout=0.1)
        e.settled([one[0].group_id, "data-999", "something else"])
        until(lambda: len(workflow.seen) == 5)
        e.settled([group[0].group_id for group in (one, *others)])
        until(lambda: len(workflow.seen) == 8)
        assert len(e.sessions_batch(stream, workflow, timeout=60)) == 4


def test_an_episode_knows_its_task_and_sampling() -> None:
    sampling = GenerationHyperparameters(temperature=0.7)
    greedy = sampling.new(temperature=0.0)
    workflow = Doing()
    options = {"sampling": sampling, "eval_sampling": greedy}
    with executor(options=options) as e:
        e.release(5)
        task = e.submit({"n": 1}, workflow)
        e.wait(1, timeout=60)
        evaluation = e.submit({"n": 1}, workflow, is_eval=True)
        e.wait(1, timeout=60)
    assert workflow.seen == [
        context.WorkflowContext(task, False, 5, 0.7, sampling),
        context.WorkflowContext(evaluation, True, 5, 0.0, greedy),
    ]


def test_each_run_has_data_of_its_own() -> None:
    def spoil(data: dict[str, Any]) -> None:
        assert data.pop("words") == ["a"]
        data["deep"]["list"].append(1)
        assert data["deep"]["list"] == [1]

    item = {"n": 1, "words": ["a"], "deep": {"list": []}}
    uncopied, workflow = {"n": 1, "lock": threading.Lock()}, Doing()
    with executor() as e:
        e.rollout_batch([item, item], Doing(spoil), group_size=2)
        e.rollout_batch([uncopied], workflow)
    assert not e.rejected
    assert item == {"n": 1, "words": ["a"], "deep": {"list": []}}
    assert workflow.data[0]["lock"] is uncopied["lock"]


class Made(Doing):
    count = 0

    def __init__(self, n: int) -> None:
        super().__init__()
        Made.count += 1


def test_a_workflow_is_made_once_for_all_items() -> None:
    name = f"{__name__}.Made"
    with executor() as e:
        for given, n in ((name, 1), (name, 1), (name, 2), (Made, 1)):
            e.rollout_batch(items(3), given, {"n": n})
    assert Made.count == 3


def test_while_paused_only_evaluations_begin() -> None:
    workflow = Gated()
    with executor() as e:
        before = e.submit({"n": 1}, workflow)
        until(lambda: workflow.waiting == [1])
        e.pause()
        after = e.submit({"n": 2}, workflow)
        evaluation = e.submit({"n": 3}, workflow, is_eval=True)
        workflow.let(1, 3)
        assert e.wait_for_task(before, timeout=60) is not None
        assert e.wait_for_task(evaluation, timeout=60) is not None
        with fails_with(TimeoutError, "paused"):
            e.wait_for_task(after, timeout=0.05)
        with fails_with(RuntimeError, "resume()"):
            e.wait_for_task(after)
        e.resume()
        workflow.let(2)
        assert e.wait_for_task(after, timeout=60) is not None


def test_evaluations_run_beside_a_full_set_of_training_episodes() -> None:
    train, evaluation = Gated(), Gated()
    with executor(max_concurrent=2, eta=5) as e:
        for item in items(4):
            e.submit(item, train)
        ids = [e.submit(item, evaluation, is_eval=True) for item in items(3)]
        until(lambda: len(train.waiting) == 2 and len(evaluation.waiting) == 2)
        evaluation.let(0, 1, 2)
        for number in ids:
            assert e.wait_for_task(number, timeout=60) is not None
        assert len(train.waiting) == 2
        assert e.capacity.buffered == 0, "what is never trained on holds up nothing"


def test_an_interrupt_ends_the_wait_and_the_end_cancels_what_runs() -> None:
    with pytest.raises(RuntimeError):  # it was not started
        WorkflowExecutor(None, RolloutConfig()).submit({}, Doing())  # type: ignore[call-arg]
    workflow = Gated()
    with executor() as e:
        for item in items(3):
            e.submit(item, workflow, group_size=2)
        until(lambda: len(workflow.waiting) == 6)
        threading.Timer(0.1, e.interrupt).start()
        with pytest.raises(InterruptedError):
            e.wait(1)
        with pytest.raises(InterruptedError):
            e.submit({"n": 2}, workflow)
        with pytest.raises(InterruptedError):
            e.prepare_batch(items(3), workflow)
    assert sorted(workflow.cancelled) == [0, 0, 1, 1, 2, 2]
    assert e.rejected == {}, "what was cancelled has not failed"


def test_several_callers_at_once_each_get_their_own_results() -> None:
    with executor(batch_size=2, eta=0, max_concurrent=3) as e, ThreadPoolExecutor(4) as threads:

        def work(first: int) -> list[int]:
            data = [{"n": first + n} for n in range(20)]
            return [numbers(r)[0] for r in e.rollout_batch(data, Doing())]

        got = list(threads.map(work, range(0, 400, 100)))
    assert got == [[100 * k + n for n in range(20)] for k in range(4)]


@pytest.mark.parametrize("is_eval", [True, False])
def test_dropped_items_are_forgotten_whether_running_or_waiting(is_eval: bool) -> None:
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


def test_dropping_a_finished_item_frees_its_room() -> None:
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


def results(*futures: Future[Any]) -> tuple[list[Any], list[BaseException]]:
    errors = [error for f in futures if (error := f.exception(LIMIT)) is not None]
    return [f.result() for f in futures if f.exception() is None], errors


@pytest.mark.parametrize("asked", ["wait_for_task", "wait_for_runs"])
def test_of_two_who_wait_for_one_item_one_gets_it(asked: str) -> None:
    flow = Gated()
    with executor() as e, ThreadPoolExecutor(2) as threads:
        task = e.submit({"n": 7}, flow)
        futures = [threads.submit(getattr(e, asked), task) for _ in range(2)]
        flow.let(7)
        got, errors = results(*futures)
    assert len(got) == 1
    (error,) = errors
    assert isinstance(error, ValueError) and "task_id 0" in str(error)


def test_of_two_who_wait_for_more_than_there_is_one_is_told() -> None:
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


def test_a_batch_that_another_thread_takes_from_fails_by_name() -> None:
    flow = Gated()
    with executor() as e, ThreadPoolExecutor(1) as threads:
        future = threads.submit(e.rollout_batch, items(3), flow)
        flow.let(1)
        assert e.wait(1, LIMIT) != [None]
        flow.let(0, 2)
        with fails_with(ValueError, "another thread"):
            future.result(LIMIT)


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
