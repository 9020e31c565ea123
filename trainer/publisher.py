"""The policy's weights on every rank, under versions never reused, and the run's status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import torch

from any_agent.client.rl_client import RLClient
from any_agent.config import Config
from any_agent.engine import HALF_LOADED, split_adapter
from any_agent.errors import AnyAgentError, ConfigError, StaleOwner
from any_agent.rollout import LeaseExecutor, RankClients
from any_agent.rundir.checksums import sound
from any_agent.rundir.layout import RunDir, read_json, weights_folder, write_json
from any_agent.runtime.atomic_files import make_folder
from any_agent.runtime.disk_space import DiskSpace
from trainer.lora import adapter_tensors
from trainer.policy import Policy
from trainer.sync import NewWeights, WeightSync, make_sync
from trainer.weight_folders import (
    holds_weights,
    prune,
    publish_adapter,
    publish_to_disk,
    weights_bytes,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

TIMEOUT = 120.0  # seconds that the trainer waits for a proxy to restart
ANNOUNCE_TIMEOUT = 5.0  # seconds that a rank may take to accept the announcement of a checkpoint
_BUCKET_BYTES = 256 * 2**20
"""Bytes of weights in one bucket; no more of sharded weights is ever whole in one place."""
MAX_REMEMBERED = 4096  # versions whose train steps are recorded
_LONG_AGO = -(10**9)

TrainingState: TypeAlias = Literal["training", "finished"]


class WeightVersions:
    """Weight versions of one run, and how many train steps each has behind it.

    The run's `state.json` stores them, so that a resumed run continues above the highest. Raises
    ConfigError if it is damaged.
    """

    def __init__(self, path: Path, disk: DiskSpace | None = None) -> None:
        self._disk = disk or DiskSpace()
        self._path = path
        try:
            saved = read_json(path, {})
            self.highest = int(saved.get("highest_version", 0))
            steps = saved.get("versions", {"0": 0}).items()
            self._steps: dict[int, int] = {int(version): step for version, step in steps}
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is damaged ({error}): restore it from a copy, or put "
                '{"highest_version": N} into it, N being above every version that the run has '
                "published"
            ) from None

    def at_least(self, version: int) -> None:
        """Continue above a version that an engine serves, whatever its origin."""
        self.highest = max(self.highest, version)

    def reserve(self, step: int) -> int:
        """Return the next version; it is on disk before anything can see it."""
        self.highest += 1
        self._steps[self.highest] = step
        for old in sorted(self._steps)[:-MAX_REMEMBERED]:
            del self._steps[old]
        state = {"highest_version": self.highest, "step": step, "versions": self._steps}
        what = f"the number of version {self.highest}"
        self._disk.write(lambda: write_json(self._path, state), self._path.parent, what)
        return self.highest

    def steps_of(self, versions: set[int]) -> Mapping[int, int]:
        """Return the train steps behind each; unknown versions count as long ago."""
        return {version: self._steps.get(version, _LONG_AGO) for version in versions}


class Publisher:
    """Publishes weights to the ranks, and knows which version they have."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        executor: LeaseExecutor,
        disk: DiskSpace,
        updating: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext(),
    ) -> None:
        """``updating`` is entered with the version while the engines change their weights."""
        self.updating = updating
        self.versions = WeightVersions(run_dir.state, disk)
        self._disk = disk
        self._config = config
        self._adapter = any(split_adapter(url)[1] for url in config.engine.urls)
        """The engines are live adapters of others, and get the adapter alone."""
        self._folder = run_dir.adapters if self._adapter else run_dir.weights
        self.executor = executor
        self.sync: WeightSync | None = None
        self._dtype = {"float32": None, "bfloat16": torch.bfloat16}[config.model.dtype]
        self.last: NewWeights | None = None

    @property
    def version(self) -> int:
        """The version that the ranks got last; 0 for the configured model."""
        return self.last.version if self.last is not None else 0

    def publish(self, policy: Policy, tokenizer: Path) -> None:
        """Give the weights, as a version never used before, to every rank and the run's folder."""
        new = self._weights(policy, tokenizer, self.versions.reserve(policy.steps))
        self.last = new
        self._give(new, self._sync_of(policy).update)
        self.bring_joining()
        if not new.folder.is_dir():
            # Engines that restart load the weights from this folder.
            new.write()
        prune(self._folder, self._config.train.keep_weights)

    def bring_joining(self) -> None:
        """Give the last version to ranks that join with an older one, and to those whose engine
        came back without weights; training waits for none."""
        last, sync = self.last, self.sync
        if last is None or sync is None:
            return
        behind = self.executor.call(self._behind(last.version))
        if not behind:
            return
        try:
            self._give(last, partial(sync.update, wanted=behind))
        except StaleOwner:
            raise
        except AnyAgentError as error:
            log.warning("ranks %s have not taken version %d: %s", behind, last.version, error)

    async def _behind(self, version: int) -> list[int]:
        ranks = self.executor.ranks
        entries = {rank: ranks.entry(rank) for rank in ranks.sampling}
        versions = {rank: entry.version for rank, entry in entries.items() if entry}
        behind = [rank for rank in ranks.joining if versions.get(rank, version) != version]
        for rank in versions.keys() - {*behind}:
            # An entry is as old as its last heartbeat: the rank is asked itself.
            with suppress(AnyAgentError):
                if versions[rank] == HALF_LOADED:
                    info = await ranks.clients[rank].run_info()
                    behind += [rank] if info.version == HALF_LOADED else []
        return behind

    def repair(self) -> None:
        """Give the last version again to ranks that sample with another one."""
        if self.last is not None and self.sync is not None:
            self._give(self.last, self.sync.repair)

    def _give(self, new: NewWeights, bring: Callable[[RankClients, NewWeights], None]) -> None:
        assert self.sync is not None
        self.sync.prepare(new)
        with self.updating(new.version):
            bring(self.executor.ranks, new)

    def close(self) -> None:
        """Release the resources shared with the engines; the executor may have ended."""
        if self.sync is not None:
            self.sync.close()

    def resume(self, policy: Policy, tokenizer: Path, *, fresh: bool) -> None:
        """Make every rank serve the policy at the trainer's start.

        Ranks that already serve it are left alone: their calls under way are not interrupted.
        ``fresh``: the policy is the configured model itself, as the engines load it.
        """
        ranks = self.executor.ranks.sampling
        versions = [info.version for info in _each(self.executor, lambda r: r.run_info(), ranks)]
        self.versions.at_least(max(versions))
        if len(set(versions)) == 1 and self._holds(policy, tokenizer, versions[0], fresh=fresh):
            # One may be paused, if an earlier trainer died in the middle of an update.
            _each(self.executor, lambda rank: rank.resume(), ranks)
        else:
            self.publish(policy, tokenizer)

    def _weights(self, policy: Policy, tokenizer: Path, version: int) -> NewWeights:
        folder = weights_folder(self._folder, version)

        def publish() -> Path:
            if self._adapter:
                return publish_adapter(policy, self._folder, version)
            return publish_to_disk(policy, tokenizer, self._folder, version, dtype=self._dtype)

        def write() -> None:
            # Also before a later use, by engines that cannot check what they load.
            if not sound(folder):
                make_folder(self._folder)
                needed = partial(_adapter_bytes, policy)
                if not self._adapter:
                    needed = partial(weights_bytes, policy, self._dtype)
                self._disk.write(publish, self._folder, f"version {version}", needed)

        buckets = partial(policy.buckets, _BUCKET_BYTES, self._dtype)
        return NewWeights(version, policy.steps, folder, write, buckets)

    def _sync_of(self, policy: Policy) -> WeightSync:
        if self.sync is None:
            self.sync = make_sync(
                self._config,
                self.executor.call,
                cuda=policy.device.type == "cuda",
                engines=self.executor.call(self._engines(), timeout=TIMEOUT),
                base=policy.base if self._adapter else None,
            )
        return self.sync

    async def _engines(self) -> list[str]:
        ranks = self.executor.ranks
        entries = [ranks.entry(rank) for rank in ranks.sampling]
        return [entry.engine_url for entry in entries if entry and entry.engine_url]

    def _holds(self, policy: Policy, tokenizer: Path, version: int, *, fresh: bool) -> bool:
        """Return True if the weights of this version are the policy's."""
        if self._config.engine.urls:
            # An engine that any-agent did not start may have any weights.
            return False
        if version == 0:
            return fresh
        path = weights_folder(self._folder, version)
        if not sound(path) or not holds_weights(path, policy, dtype=self._dtype):
            return False
        self.last = self._weights(policy, tokenizer, version)
        self._sync_of(policy)
        return True


def _adapter_bytes(policy: Policy) -> int:
    return sum(t.numel() * t.itemsize for t in adapter_tensors(policy.model).values())


def _each(
    executor: LeaseExecutor,
    call: Callable[[RLClient], Awaitable[T]],
    wanted: Sequence[int] | None = None,
) -> list[T]:
    """Call these ranks at once, or every one, and wait for all of them."""
    ranks = executor.ranks
    return executor.call(
        ranks.all(lambda rank: call(ranks.clients[rank]), wanted), timeout=2 * TIMEOUT
    )


class RunStatus(NamedTuple):
    """The progress of the run."""

    step: int
    checkpoint: str | None
    """The newest checkpoint."""
    oldest_step: int | None
    """The step of the oldest checkpoint to resume from; None: training would start again."""


def announce(executor: LeaseExecutor, state: TrainingState, status: RunStatus) -> None:
    """Announce the state to every rank, or raise.

    A rank that misses that training continues, or has ended, rejects agents or lets them wait,
    wrongly.
    """
    _each(executor, lambda rank: rank.set_run(state, **status._asdict()))


def announce_best_effort(executor: LeaseExecutor, status: RunStatus) -> None:
    """Announce a new checkpoint; a rank that is away delays nothing and gets the next one."""
    ranks = executor.ranks

    async def send(rank: int) -> None:
        try:
            async with asyncio.timeout(ANNOUNCE_TIMEOUT):
                await ranks.clients[rank].set_run("training", **status._asdict())
        except StaleOwner:
            raise
        except (AnyAgentError, TimeoutError) as error:
            log.warning(
                "rank %d did not accept the status of step %d: %r", rank, status.step, error
            )

    executor.call(ranks.all(send))
