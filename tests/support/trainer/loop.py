"""The training loop's surroundings: a service that hands out made-up episodes, and forgets none."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file

from any_agent.config import Config, load_config
from any_agent.errors import Conflict, NotFound, ServiceUnavailable
from any_agent.protocol.training import Rejection
from any_agent.types import Trajectory
from any_agent.workflow import Episode
from tests.support.fixed_ranks import FixedRanks
from tests.support.trainer.episodes import pair
from trainer.batch_source import LeasedBatches
from trainer.command_channel import Leader
from trainer.loop import TrainingLoop
from trainer.manifests import ManifestStore
from trainer.policy import Policy
from trainer.sync import NewWeights

STEPS = 5
RUN = (f"train.steps={STEPS}", "train.checkpoint_every=2", "rollout.eta=9")
Method = Callable[..., Any]


class Killed(BaseException):
    """The process ends here; nothing after it runs."""


def killed(what: Method, when: int, *, before: bool = False) -> Method:
    """The function, and death after (or before) it is called for the n-th time."""
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == when:
            raise Killed
        result = what(*args, **kwargs)
        if calls == when:
            raise Killed
        return result

    return dying


class Service:
    """What the trainer tells it."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.states: list[tuple[str, int]] = []
        self.oldest: list[int | None] = []
        """The oldest checkpoints' steps that it was told of."""
        self.published: list[tuple[int, int]] = []
        self.resumed = 0
        self.away = ""
        """How it does not hear what is said of the run: `silent` or `refusing`."""

    async def resume(self) -> None:
        self.resumed += 1

    async def run_info(self) -> SimpleNamespace:
        return SimpleNamespace(version=self.version)

    async def set_run(
        self, state: str, *, step: int, checkpoint: str | None, oldest_step: int | None
    ) -> None:
        if self.away == "refusing":
            raise ServiceUnavailable("away")
        if self.away:
            await asyncio.Event().wait()
        self.states.append((state, step))
        self.oldest.append(oldest_step)


class Sync:
    """An engine that takes every version, from its folder."""

    def prepare(self, new: NewWeights) -> None:
        new.write()

    def update(self, ranks: FixedRanks, new: NewWeights) -> None:
        assert (new.folder / "config.json").is_file()
        ranks.clients[0].published.append((new.version, new.step))
        ranks.clients[0].version = new.version

    def repair(self, ranks: FixedRanks, new: NewWeights) -> None:
        if ranks.clients[0].version != new.version:
            self.update(ranks, new)

    def close(self) -> None: ...


class Executor:
    """Hands out episodes in the order of a script, one per batch."""

    journal: dict[str, Trajectory]
    """What was ever handed out."""
    settled: set[str]
    """Acknowledged, in this life or an earlier one."""

    def __init__(self, episodes: list[Episode], version: int) -> None:
        self.ranks = FixedRanks(Service(version))
        self.acks: list[tuple[list[str], dict[str, str]]] = []
        self.steps: list[int | None] = []
        """Of each ack."""
        self.lost: set[str] = set()
        """Of ranks whose journals are gone."""
        self.capacity = None
        self.rejected: Counter[str] = Counter()
        self.begun = False
        self.replayed: list[list[str]] = []
        self._episodes = deque(episodes)

    def start(self) -> None: ...

    def begin(self) -> None:
        self.begun = True

    def stop(self) -> None: ...

    def flush(self) -> None: ...

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout: float = 1.0) -> Any:
        return asyncio.run(coroutine)

    def prepare_batch(self, timeout: float) -> list[Episode]:
        if not self._episodes:
            raise InterruptedError
        episode = self._episodes.popleft()
        self.journal.update((t.session_id, t) for t in episode)
        return [episode]

    def interrupt(self) -> None:
        self._episodes.clear()

    def replay(self, session_ids: list[str], timeout: float) -> dict[str, Trajectory]:
        assert not self.begun
        self.replayed.append(session_ids)
        if lost := sorted(self.lost & {*session_ids}):
            raise NotFound(f"there is no session {lost[0]!r}", code="session_not_found")
        missing = [id for id in session_ids if id not in self.journal]
        if missing:
            raise Conflict(f"these are open: {missing}")
        return {id: self.journal[id] for id in reversed(session_ids)}

    def ack(
        self, trained: list[str], rejected: list[Rejection], *, step: int | None = None
    ) -> None:
        self.steps.append(step)
        self.acks.append((list(trained), {r.session_id: r.reason for r in rejected}))
        self.settled.update(trained, self.acks[-1][1])


class Lab:
    """One start of the run in a folder."""

    def __init__(
        self,
        config: Config,
        episodes: list[Episode],
        version: int = 0,
        *,
        before: Lab | None = None,
        leader: Leader | None = None,
    ) -> None:
        """``before``: the start whose ranks and journals these are."""
        self.trainer = TrainingLoop(config, leader=leader)
        self.trainer.dir.create()
        self.executor = Executor(episodes, before.service.version if before else version)
        self.executor.journal = before.executor.journal if before else {}
        self.executor.settled = before.executor.settled if before else set()
        self.trainer.executor = self.executor  # type: ignore[assignment]
        self.trainer.source = LeasedBatches(  # type: ignore[arg-type]
            self.executor, self.trainer.source.zero_variance
        )
        self.trainer.publisher.executor = self.executor  # type: ignore[assignment]
        self.trainer.publisher.sync = Sync()  # type: ignore[assignment]

    def at(self, boundary: str, change: Callable[[Method, bool], Method]) -> None:
        """Change, once the policy is loaded, the method at whose end a boundary is, or at whose
        beginning: True."""
        load = self.trainer.load

        def loaded() -> None:
            load()
            trainer = self.trainer
            before = boundary.startswith("before ")
            owner, name = {
                "lease": (self.executor, "prepare_batch"),
                "batch": (trainer.source, "next_batch"),
                "manifest": (trainer.manifests, "write"),
                "step": (trainer.policy, "step"),
                "update": (trainer.policy.optimizer, "step"),
                "published": (trainer.publisher, "publish"),
                "settled": (trainer.source, "settle"),
                "ack": (self.executor, "ack"),
                "checkpoint": (trainer, "save"),
            }[boundary.removeprefix("before ")]
            setattr(owner, name, change(getattr(owner, name), before))

        self.trainer.load = loaded  # type: ignore[method-assign]

    def die(self, boundary: str, when: int = 1) -> Self:
        """Train until it dies at the n-th time of a boundary."""
        self.at(boundary, lambda method, before: killed(method, when, before=before))
        with pytest.raises(Killed):
            self.trainer.train()
        return self

    def again(self) -> Lab:
        """The next start, with the sessions of :func:`episodes` that no step took for good."""
        store = ManifestStore(self.trainer.dir.manifests)
        taken = {id for step in store.steps() for id in store.read(step).sessions}
        taken |= self.executor.settled
        left = [e for e in episodes() if not {t.session_id for t in e} & taken]
        return Lab(self.trainer.config, left, before=self)

    @property
    def service(self) -> Service:
        return self.executor.ranks.clients[0]

    @property
    def manifests(self) -> list[int]:
        paths = self.trainer.dir.manifests.glob("step-*.json")
        return sorted(int(path.stem.removeprefix("step-")) for path in paths)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.trainer.dir.metrics.read_text().splitlines()]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.trainer.policy.model.parameters()]


def settings_of(root: Path, model: Path) -> list[str]:
    return [f"root={root}", f"model.path={model}", "train.lr=1e-3", "train.seed=1"]


def episodes() -> list[Episode]:
    """One for each of the steps."""
    return [pair(f"p{k}", turns=1 + k % 3) for k in range(STEPS)]


def config_of(settings: list[str], *more: str) -> Config:
    return load_config(None, [*settings, *more], environ={})


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def moments_of(policy: Policy) -> list[torch.Tensor]:
    return [policy.optimizer.state[p]["exp_avg_sq"] for p in policy.model.parameters()]


def outcome(lab: Lab) -> dict[str, Any]:
    """What the last checkpoint holds, tensor by tensor, but for versions and Python's generator."""
    checkpoint = lab.trainer.checkpoint
    assert checkpoint is not None
    state = json.loads((checkpoint / "trainer" / "state.json").read_text())
    del state["state"]["version"]
    # Threads that earlier tests left in this process may have drawn from it.
    del state["generators"]["python"]
    tensors = {
        f"{path.name}/{name}": tensor
        for path in sorted(checkpoint.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    assert len(tensors) > 20
    return {"name": checkpoint.name, "state": state, "tensors": tensors}


def assert_same_outcome(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["name"] == other["name"]
    assert one["state"] == other["state"]
    assert one["tensors"].keys() == other["tensors"].keys()
    different = [k for k, t in one["tensors"].items() if not torch.equal(t, other["tensors"][k])]
    assert different == []


def assert_same_policy(one: Lab, other: Lab) -> None:
    """Weights and moments, bit for bit."""
    assert same(one.weights(), other.weights())
    assert same(moments_of(one.trainer.policy), moments_of(other.trainer.policy))
