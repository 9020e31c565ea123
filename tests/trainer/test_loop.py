"""The training loop, with a real policy and a service that hands out made-up episodes."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, deque
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from episode_lab import pair

from any_agent.config import Config, load_config
from any_agent.errors import TrainingError
from any_agent.protocol import Rejection
from any_agent.rollout import Ranks
from any_agent.workflow import Episode
from trainer.loop import GRPOTrainer
from trainer.policy import Policy


class Service:
    """What the trainer tells it."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.states: list[tuple[str, int]] = []
        self.published: list[tuple[int, int]] = []

    async def run_info(self) -> SimpleNamespace:
        return SimpleNamespace(version=self.version)

    async def set_run(self, state: str, *, step: int, checkpoint: str | None) -> None:
        self.states.append((state, step))


class OneRank:
    """Stands for `Ranks`."""

    def __init__(self, service: Service) -> None:
        self.clients = (service,)

    def __len__(self) -> int:
        return 1

    all = Ranks.all


class Sync:
    """An engine that takes every version."""

    async def update(self, ranks: OneRank, path: Path, *, version: int, step: int) -> None:
        assert (path / "config.json").is_file()
        ranks.clients[0].published.append((version, step))


class Executor:
    """Hands out episodes in the order of a script, one per batch."""

    def __init__(self, episodes: list[Episode], version: int) -> None:
        self.ranks = OneRank(Service(version))
        self.acks: list[tuple[list[str], dict[str, str]]] = []
        self.capacity = None
        self.rejected: Counter[str] = Counter()
        self._episodes = deque(episodes)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 1.0) -> Any:
        return asyncio.run(coroutine)

    def prepare_batch(self, timeout: float) -> list[Episode]:
        if not self._episodes:
            raise InterruptedError
        return [self._episodes.popleft()]

    def interrupt(self) -> None:
        self._episodes.clear()

    def ack(self, trained: list[str], rejected: list[Rejection]) -> None:
        self.acks.append((list(trained), {r.session_id: r.reason for r in rejected}))


class Lab:
    """One start of the run in a folder."""

    def __init__(self, config: Config, episodes: list[Episode], version: int = 0) -> None:
        self.trainer = GRPOTrainer(config)
        self.trainer.dir.create()
        self.executor = Executor(episodes, version)
        self.trainer._executor = self.executor  # type: ignore[assignment]
        self.trainer._sync = Sync()  # type: ignore[assignment]

    @property
    def service(self) -> Service:
        return self.executor.ranks.clients[0]

    @property
    def manifests(self) -> list[int]:
        paths = self.trainer.dir.manifests.glob("*.json")
        return sorted(int(path.stem.removeprefix("step-")) for path in paths)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.trainer.dir.metrics.read_text().splitlines()]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.trainer.policy.model.parameters()]


@pytest.fixture
def settings(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    return [f"root={tmp_path}", f"model.path={tiny_model_dir}", "train.lr=1e-3", "train.seed=1"]


def config_of(settings: list[str], *more: str) -> Config:
    return load_config(None, [*settings, *more], environ={})


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def moments_of(policy: Policy) -> list[torch.Tensor]:
    return [policy.optimizer.state[p]["exp_avg_sq"] for p in policy.model.parameters()]


def not_finite(name: str) -> Episode:
    """An agent's data that passed every check, and makes the loss infinite all the same."""
    return pair(name, logprob=math.nan)


def test_a_run(settings: list[str]) -> None:
    lab = Lab(config_of(settings, "train.steps=3"), [pair(f"p{k}") for k in range(3)])
    lab.trainer.train()
    assert lab.executor.acks == [([f"p{k}-good", f"p{k}-bad"], {}) for k in range(3)]
    assert lab.service.published == [(1, 1), (2, 2), (3, 3)]
    assert lab.service.states == [("training", 0), ("finished", 3)]
    assert [line["step"] for line in lab.metrics] == [1, 2, 3]


def test_a_run_that_is_stopped_keeps_what_it_trained(settings: list[str]) -> None:
    lab = Lab(config_of(settings, "train.steps=9"), [pair("p0"), pair("p1")])
    publish = lab.trainer._publish

    def stop_after_the_first_step() -> None:
        publish()
        lab.trainer.stop()

    lab.trainer._publish = stop_after_the_first_step  # type: ignore[method-assign]
    assert lab.trainer.train() is False
    assert lab.trainer.checkpoint is not None
    assert lab.trainer.checkpoint.name == "step-00000001"
    assert lab.executor.acks == [(["p0-good", "p0-bad"], {})]
    assert lab.service.states == [("training", 0)]


def test_a_step_that_is_not_finite_is_left_out(settings: list[str]) -> None:
    lab = Lab(config_of(settings), [not_finite("bad"), pair("good")])
    lab.trainer._load()
    before = lab.weights()
    lab.trainer._step()
    assert same(before, lab.weights())
    assert lab.trainer.policy.steps == 0
    assert lab.trainer.policy.optimizer.state == {}
    assert lab.executor.acks == [([], {"bad-good": "not_finite", "bad-bad": "not_finite"})]
    assert lab.service.published == []
    lab.trainer._step()
    assert not same(before, lab.weights())
    assert lab.executor.acks[1:] == [(["good-good", "good-bad"], {})]
    assert lab.service.published == [(1, 1)]


def test_many_in_a_row_end_the_training(settings: list[str]) -> None:
    """A good one in between begins the count anew."""
    four = [not_finite(f"a{k}") for k in range(4)]
    five = [not_finite(f"b{k}") for k in range(5)]
    lab = Lab(config_of(settings), [*four, pair("good"), *five, pair("never")])
    with pytest.raises(TrainingError, match=r"5 steps in a row were not finite.*lower train\.lr"):
        lab.trainer.train()
    assert lab.trainer.policy.steps == 1
    assert all(bool(torch.isfinite(p).all()) for p in lab.weights())
    assert len(lab.executor.acks) == 4 + 1 + 4


def test_a_batch_with_nothing_left_makes_no_step(settings: list[str]) -> None:
    lab = Lab(config_of(settings), [pair("odd", untrainable="x"), pair("unknown", version=77)])
    lab.trainer._load()
    lab.trainer._step()
    lab.trainer._step()
    assert lab.trainer.policy.steps == 0
    assert lab.executor.acks == [
        ([], {"odd-good": "untrainable", "odd-bad": "untrainable"}),
        # Weights that this run knows nothing of.
        ([], {"unknown-good": "stale", "unknown-bad": "stale"}),
    ]


def test_a_resume_goes_on_with_the_settings_of_its_own_start(settings: list[str]) -> None:
    first = Lab(config_of(settings, "train.steps=2"), [pair("a"), pair("b")])
    first.trainer.train()
    moments = moments_of(first.trainer.policy)
    more = ["train.steps=3", "train.lr=0.25", "train.betas=[0.5, 0.75]", "train.weight_decay=0.125"]
    again = Lab(config_of(settings, *more, "train.grad_clip=0.0625"), [pair("b"), pair("c")], 2)
    assert again.trainer._load()
    (group,) = again.trainer.policy.optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.25, (0.5, 0.75), 0.125)
    assert again.trainer.policy.config.grad_clip == 0.0625
    # What it has learned so far stays.
    assert same(moments, moments_of(again.trainer.policy))
    assert same(first.weights(), again.weights())


def test_a_resume_publishes_first_and_trains_on_nothing_twice(settings: list[str]) -> None:
    first = Lab(config_of(settings, "train.steps=2"), [pair("a"), pair("b")])
    first.trainer.train()
    again = Lab(config_of(settings, "train.steps=3"), [pair("b"), pair("c", version=3)], version=2)
    again.trainer.train()
    assert again.service.published == [(3, 2), (4, 3)]
    assert again.executor.acks == [(["b-good", "b-bad"], {}), (["c-good", "c-bad"], {})]
    # Already done: nothing is saved, or published under the step's own folder, again.
    saved = again.trainer.checkpoint
    assert saved is not None
    written = saved.stat().st_mtime_ns
    done = Lab(config_of(settings, "train.steps=3"), [], version=4)
    done.trainer.train()
    assert saved.stat().st_mtime_ns == written
    assert done.service.states == [("training", 3), ("finished", 3)]


def test_the_version_of_an_engine_is_not_used_again(settings: list[str]) -> None:
    lab = Lab(config_of(settings, "train.steps=1"), [pair("a")], version=41)
    lab.trainer.train()
    assert lab.service.published == [(42, 1)]


def test_manifests_go_with_their_checkpoints(settings: list[str]) -> None:
    """Kept are those that a resume from the oldest checkpoint would give up."""
    config = config_of(
        settings, "train.steps=5", "train.checkpoint_every=1", "train.keep_checkpoints=2"
    )
    lab = Lab(config, [pair(f"p{k}", version=k) for k in range(5)])
    lab.trainer.train()
    kept = sorted(path.name for path in lab.trainer.dir.checkpoints.glob("step-*"))
    assert kept == ["step-00000004", "step-00000005"]
    assert lab.manifests == [5]
    manifest = json.loads((lab.trainer.dir.manifests / "step-00000005.json").read_text())
    assert manifest == {
        "step": 5,
        "trained": ["p4-good", "p4-bad"],
        "rejected": {},
        "tokens": [2, 2],
    }
