from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch

from any_agent import stats_tracker
from any_agent.stats_tracker import ReduceType, StatsTracker
from tests.support.errors import fails_with


@pytest.fixture
def tracker() -> StatsTracker:
    return StatsTracker()


def test_scalars_are_averaged_and_counted(tracker: StatsTracker) -> None:
    for reward in (1.0, 0.0, 0.5):
        tracker.scalar(reward=reward, turns=np.int64(3))
    assert tracker.export() == {
        "reward": 0.5,
        "reward__count": 3,
        "turns": 3.0,
        "turns__count": 3,
    }
    assert tracker.export() == {}


def test_an_export_may_leave_everything_as_it_is(tracker: StatsTracker) -> None:
    tracker.scalar(a=1.0)
    assert tracker.export(reset=False) == tracker.export() == {"a": 1.0, "a__count": 1}


def test_one_key_may_be_exported_alone(tracker: StatsTracker) -> None:
    with tracker.scope("x"):
        tracker.scalar(a=1.0, b=2.0)
        assert tracker.export(key="a") == {"x/a": 1.0, "x/a__count": 1}
        assert tracker.export(key="none") == {}
    assert tracker.export() == {"x/b": 2.0, "x/b__count": 1}


def test_scopes_nest_under_the_name_of_their_tracker(tracker: StatsTracker) -> None:
    named = StatsTracker("rollout")
    with named.scope("a"), named.scope("/b/"):
        named.scalar(x=1.0)
        with named.disable_scope():
            named.scalar(y=1.0)
        named.scalar(z=1.0)
    assert set(named.export()) == {
        *("rollout/a/b/x", "rollout/a/b/x__count", "y", "y__count"),
        *("rollout/a/b/z", "rollout/a/b/z__count"),
    }

    @tracker.scope_func_wrapper("step")
    def step(value: float) -> float:
        tracker.scalar(value=value)
        return value

    assert step(2.0) == 2.0
    assert step.__name__ == "step"
    assert tracker.export() == {"step/value": 2.0, "step/value__count": 1}


async def test_concurrent_tasks_have_scopes_of_their_own(tracker: StatsTracker) -> None:
    meet = asyncio.Barrier(2)

    async def record(name: str) -> None:
        with tracker.scope(name):
            await meet.wait()
            tracker.scalar(x=1.0)
            await meet.wait()

    await asyncio.gather(record("a"), record("b"))
    assert set(tracker.export()) == {"a/x", "a/x__count", "b/x", "b/x__count"}


@pytest.mark.parametrize("array", [torch.tensor, lambda v, **k: np.array(v)])
def test_masked_values_have_mean_and_extremes(tracker: StatsTracker, array: Any) -> None:
    for values, mask in (([1.0, 2.0, 99.0], [1, 1, 0]), ([6.0, 77.0, 88.0], [1, 0, 0])):
        tracker.denominator(tokens=array(np.array(mask, np.bool_)))
        tracker.stat(loss=array(np.array(values, np.float32)), denominator="tokens")
    assert tracker.export() == {
        "tokens": 3.0,
        "loss/avg": 3.0,
        "loss/min": 1.0,
        "loss/max": 6.0,
    }


@pytest.mark.parametrize(
    ("kind", "value"),
    [(ReduceType.AVG, 2.0), (ReduceType.SUM, 4.0), (ReduceType.MIN, 1.0), (ReduceType.MAX, 3.0)],
)
def test_each_reduction_has_its_own_value(
    tracker: StatsTracker, kind: ReduceType, value: float
) -> None:
    tracker.denominator(n=np.array([True, True, False]))
    tracker.stat("n", kind, x=torch.tensor([1.0, 3.0, 9.0], dtype=torch.bfloat16))
    assert tracker.export()["x"] == value


def test_nothing_under_the_mask_exports_nothing(tracker: StatsTracker) -> None:
    tracker.denominator(n=np.array([False]))
    tracker.stat("n", x=np.array([1.0]))
    assert tracker.export() == {"n": 0.0}


def test_gradients_are_left_alone(tracker: StatsTracker) -> None:
    values = torch.tensor([1.0], requires_grad=True)
    tracker.denominator(n=torch.tensor([True]))
    tracker.stat("n", x=values)
    assert tracker.export()["x/avg"] == 1.0


def test_errors_name_the_key(tracker: StatsTracker) -> None:
    with fails_with(ValueError, "denominator n"):
        tracker.stat("n", x=np.array([1.0]))
    with fails_with(ValueError, "denominator n", "int64"):
        tracker.denominator(n=np.array([1]))
    with fails_with(ValueError, "denominator n", "[0]"):
        tracker.denominator(n=np.array([], np.bool_))
    tracker.denominator(n=np.array([True]))
    with fails_with(ValueError, "stat x", "[2]", "[1]"):
        tracker.stat("n", x=np.array([1.0, 2.0]))
    with fails_with(ValueError, "stat x", "int64"):
        tracker.stat("n", x=np.array([1]))
    with fails_with(ValueError, "x is a list"):
        tracker.stat("n", x=[1.0])
    with fails_with(ValueError, "SCALAR"):
        tracker.stat("n", ReduceType.SCALAR, x=np.array([1.0]))
    with fails_with(ValueError, "text"):
        tracker.scalar(x="text")


def test_values_that_are_not_finite_are_left_out_with_one_warning(
    tracker: StatsTracker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for value in (1.0, float("nan"), float("inf"), 3.0):
            tracker.scalar(reward=value)
    assert tracker.export() == {"reward": 2.0, "reward__count": 2}
    assert [r.message for r in caplog.records] == ["reward was nan, which is left out of its mean"]
    tracker.denominator(n=np.array([True, True, True, False]))
    tracker.stat("n", judge=np.array([0.5, np.nan, -np.inf, 2.0]))
    found = tracker.export()
    assert [found[f"judge/{how}"] for how in ("avg", "min", "max")] == [0.5, 0.5, 0.5]


def test_timings_lie_under_one_scope(tracker: StatsTracker) -> None:
    with tracker.scope("a"), pytest.raises(KeyError), tracker.record_timing("b"):
        raise KeyError
    exported = tracker.export()
    assert exported.pop("timeperf/b__count") == 1
    assert 0 <= exported.pop("timeperf/b") < 5
    assert not exported


def test_memory_is_bounded(
    tracker: StatsTracker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stats_tracker, "MAX_KEYS", 3)
    with caplog.at_level(logging.WARNING):
        for k in range(6):
            tracker.scalar(**{f"reward_{k}": 1.0})
    assert len(tracker.export()) == 2 * 3
    assert [r.message for r in caplog.records] == [
        "more than 3 keys: reward_3 and others are not recorded"
    ]


def test_trackers_count_apart_and_are_exported_together() -> None:
    stats_tracker.export_all()
    assert stats_tracker.get("rollout") is stats_tracker.get("rollout")
    assert stats_tracker.get().scalar == stats_tracker.scalar
    stats_tracker.get("rollout").scalar(reward=0.5)
    stats_tracker.get("eval-rollout").scalar(reward=1.0)
    stats_tracker.scalar(lr=0.1)
    with stats_tracker.record_timing("step"):
        pass
    assert stats_tracker.get("rollout").export(reset=False)["rollout/reward"] == 0.5
    exported = stats_tracker.export_all()
    assert exported.pop("timeperf/step") >= 0
    assert exported == {
        "rollout/reward": 0.5,
        "rollout/reward__count": 1,
        "eval-rollout/reward": 1.0,
        "eval-rollout/reward__count": 1,
        "lr": 0.1,
        "lr__count": 1,
        "timeperf/step__count": 1,
    }
    assert stats_tracker.export_all() == {}


def test_too_many_trackers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_tracker, "_trackers", {})
    monkeypatch.setattr(stats_tracker, "MAX_TRACKERS", 2)
    first = stats_tracker.get("a")
    stats_tracker.get("b")
    with fails_with(ValueError, "'c'"):
        stats_tracker.get("c")
    assert stats_tracker.get("a") is first


def test_threads_lose_nothing(tracker: StatsTracker) -> None:
    def record() -> None:
        for _ in range(1000):
            tracker.scalar(x=1.0)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.export() == {"x": 1.0, "x__count": 4000}


@pytest.mark.service
def test_statistics_of_several_processes_are_added_up(tmp_path: Any) -> None:
    import torch.distributed as dist
    import torch.multiprocessing as processes

    assert not dist.is_initialized()
    processes.spawn(_rank, args=(2, str(tmp_path / "meet")), nprocs=2)


def _rank(rank: int, world: int, meet: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    try:
        tracker = StatsTracker()
        tracker.scalar(x=float(rank))
        if rank:
            tracker.scalar(x=5.0, only=2.0)
        tracker.denominator(n=np.array([True] * (rank + 1)))
        tracker.stat("n", loss=np.array([float(rank)] * (rank + 1)))
        exported = tracker.export(reduce_group=dist.group.WORLD)
        assert exported == {
            "x": 2.0,
            "x__count": 3,
            "only": 2.0,
            "only__count": 1,
            "n": 3.0,
            "loss/avg": pytest.approx(2 / 3),
            "loss/min": 0.0,
            "loss/max": 1.0,
        }
    finally:
        dist.destroy_process_group()
