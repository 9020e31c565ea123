"""The policy's weights on every rank, under versions that are never used twice."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from any_agent.config import Config
from any_agent.protocol import RunInfo
from any_agent.rollout import RolloutExecutor
from any_agent.rundir import RunDir, weights_folder
from trainer.policy import Policy
from trainer.sync import DiskSync
from trainer.versions import Versions
from trainer.weights import holds_weights, prune, publish_to_disk

PATIENCE = 120.0
"""Seconds that the trainer waits for a proxy that restarts."""


@dataclass(frozen=True, slots=True)
class Published:
    """What every rank was given last."""

    path: Path
    version: int
    step: int


class Publisher:
    """Publishes, and knows what the ranks have."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        executor: RolloutExecutor,
        updating: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
    ) -> None:
        """``updating`` is entered with the version while the engines change their weights."""
        self._updating = updating
        self.versions = Versions(run_dir.state)
        self._config = config
        self._folder = run_dir.weights
        self._executor = executor
        self._sync = DiskSync(load_timeout=config.engine.load_timeout)
        self._dtype = {"float32": None, "bfloat16": torch.bfloat16}[config.model.dtype]
        self._last: Published | None = None

    @property
    def version(self) -> int:
        """What the ranks were given last; 0 for the configured model."""
        return self._last.version if self._last is not None else 0

    def publish(self, policy: Policy, tokenizer: Path) -> None:
        """To every rank, as a version that was never used before."""
        version = self.versions.reserve(policy.steps)
        path = publish_to_disk(policy, tokenizer, self._folder, version, dtype=self._dtype)
        self._last = Published(path, version, policy.steps)
        self._bring(self._sync.update)
        prune(self._folder, self._config.train.keep_weights)

    def repair(self) -> None:
        """Give the last version again to ranks that sample with something else."""
        if self._last is not None:
            self._bring(self._sync.repair)

    def resume(self, policy: Policy, tokenizer: Path, *, fresh: bool) -> None:
        """Make every rank serve the policy at the trainer's start.

        What the ranks serve already is left alone: calls under way are not interrupted for it.
        ``fresh``: the policy is the configured model itself, as the engines load it.
        """
        versions = self._served()
        self.versions.at_least(max(versions))
        if len(set(versions)) == 1 and self._is(policy, versions[0], fresh=fresh):
            # One may be paused: an earlier trainer may have died in the middle of an update.
            ranks = self._executor.ranks
            resume = ranks.all(lambda rank: ranks.clients[rank].resume())
            self._executor.call(resume, timeout=2 * PATIENCE)
        else:
            self.publish(policy, tokenizer)

    def _bring(self, how: Callable[..., Coroutine[Any, Any, None]]) -> None:
        last = self._last
        assert last is not None
        with self._updating(last.version):
            self._executor.call(
                how(self._executor.ranks, last.path, version=last.version, step=last.step),
                timeout=2 * self._config.engine.load_timeout + 10 * PATIENCE,
            )

    def _is(self, policy: Policy, version: int, *, fresh: bool) -> bool:
        """Whether the weights of this version are the policy's."""
        if self._config.engine.urls:
            # An engine that somebody else started may hold any weights.
            return False
        if version == 0:
            return fresh
        path = weights_folder(self._folder, version)
        if not holds_weights(path, policy, dtype=self._dtype):
            return False
        self._last = Published(path, version, policy.steps)
        return True

    def _served(self) -> list[int]:
        """The version of each rank's engine."""
        ranks = self._executor.ranks

        async def ask() -> list[RunInfo]:
            return await ranks.all(lambda rank: ranks.clients[rank].run_info())

        return [info.version for info in self._executor.call(ask(), timeout=2 * PATIENCE)]
