"""The policy's weights on every rank, under versions that are never used twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch

from any_agent.config import Config
from any_agent.protocol.rl import RunInfo
from any_agent.rollout import LeaseExecutor
from any_agent.rundir.layout import RunDir, weights_folder
from trainer.policy import Policy
from trainer.sync import NewWeights, WeightSync, make_sync
from trainer.weight_folders import holds_weights, prune, publish_to_disk
from trainer.weight_versions import WeightVersions

TIMEOUT = 120.0
"""Seconds that the trainer waits for a proxy that restarts."""
_BUCKET = 256 * 2**20
"""Bytes that are sent at once; of sharded weights no more is ever whole in one place."""


class Publisher:
    """Publishes, and knows what the ranks have."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        executor: LeaseExecutor,
        updating: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
    ) -> None:
        """``updating`` is entered with the version while the engines change their weights."""
        self._updating = updating
        self.versions = WeightVersions(run_dir.state)
        self._config = config
        self._folder = run_dir.weights
        self._executor = executor
        self._sync: WeightSync | None = None
        self._dtype = {"float32": None, "bfloat16": torch.bfloat16}[config.model.dtype]
        self._last: NewWeights | None = None

    @property
    def version(self) -> int:
        """What the ranks were given last; 0 for the configured model."""
        return self._last.version if self._last is not None else 0

    def publish(self, policy: Policy, tokenizer: Path) -> None:
        """To every rank, as a version that was never used before; and to the run's folder."""
        new = self._weights(policy, tokenizer, self.versions.reserve(policy.steps))
        self._last = new
        sync = self._way(policy)
        sync.prepare(new)
        with self._updating(new.version):
            sync.update(self._executor.ranks, new)
        # Engines that are started again load it from there.
        new.write()
        prune(self._folder, self._config.train.keep_weights)

    def repair(self) -> None:
        """Give the last version again to ranks that sample with something else."""
        if self._last is not None and self._sync is not None:
            self._sync.prepare(self._last)
            with self._updating(self._last.version):
                self._sync.repair(self._executor.ranks, self._last)

    def close(self) -> None:
        """Leave what the engines share with this process; the executor may have ended."""
        if self._sync is not None:
            self._sync.close()

    def resume(self, policy: Policy, tokenizer: Path, *, fresh: bool) -> None:
        """Make every rank serve the policy at the trainer's start.

        What the ranks serve already is left alone: calls under way are not interrupted for it.
        ``fresh``: the policy is the configured model itself, as the engines load it.
        """
        versions = self._served()
        self.versions.at_least(max(versions))
        if len(set(versions)) == 1 and self._is(policy, tokenizer, versions[0], fresh=fresh):
            # One may be paused: an earlier trainer may have died in the middle of an update.
            ranks = self._executor.ranks
            resume = ranks.all(lambda rank: ranks.clients[rank].resume())
            self._executor.call(resume, timeout=2 * TIMEOUT)
        else:
            self.publish(policy, tokenizer)

    def _weights(self, policy: Policy, tokenizer: Path, version: int) -> NewWeights:
        folder = weights_folder(self._folder, version)

        def write() -> None:
            if not folder.is_dir():
                publish_to_disk(policy, tokenizer, self._folder, version, dtype=self._dtype)

        buckets = partial(policy.buckets, _BUCKET, self._dtype)
        return NewWeights(version, policy.steps, folder, write, buckets)

    def _way(self, policy: Policy) -> WeightSync:
        if self._sync is None:
            self._sync = make_sync(
                self._config,
                self._executor.call,
                cuda=policy.device.type == "cuda",
                engines=self._engines(),
            )
        return self._sync

    def _engines(self) -> list[str]:
        """The URLs of the ranks' engines, of those that are there."""

        async def look() -> list[str]:
            ranks = self._executor.ranks
            entries = [ranks.entry(rank) for rank in range(len(ranks))]
            return [entry.engine_url for entry in entries if entry and entry.engine_url]

        return self._executor.call(look(), timeout=TIMEOUT)

    def _is(self, policy: Policy, tokenizer: Path, version: int, *, fresh: bool) -> bool:
        """Whether the weights of this version are the policy's."""
        if self._config.engine.urls:
            # An engine that somebody else started may hold any weights.
            return False
        if version == 0:
            return fresh
        path = weights_folder(self._folder, version)
        if not holds_weights(path, policy, dtype=self._dtype):
            return False
        self._last = self._weights(policy, tokenizer, version)
        self._way(policy)
        return True

    def _served(self) -> list[int]:
        """The version of each rank's engine."""
        ranks = self._executor.ranks

        async def ask() -> list[RunInfo]:
            return await ranks.all(lambda rank: ranks.clients[rank].run_info())

        return [info.version for info in self._executor.call(ask(), timeout=2 * TIMEOUT)]
