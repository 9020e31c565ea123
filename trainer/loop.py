"""The training loop: wait for a batch, step, publish, acknowledge, keep a checkpoint."""

from __future__ import annotations

import json
import logging
import random
import time
import uuid
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from any_agent.config import Config
from any_agent.errors import ConfigError, TrainingError
from any_agent.protocol import Rejection
from any_agent.rollout import Ranks, RolloutExecutor
from any_agent.rundir import RunDir, write_json
from any_agent.workflow import Episode, ProxyWorkflow, RolloutWorkflow
from trainer.batch import TrainingBatch, training_batch, versions_in, without_signal
from trainer.checkpoint import (
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from trainer.loss import LossConfig, preset
from trainer.metrics import TrainerMetrics
from trainer.packing import count_trained, micro_batches
from trainer.policy import Policy, PolicyConfig, StepResult
from trainer.sync import DiskSync
from trainer.versions import Versions
from trainer.weights import prune, publish_to_disk, tokenizer_of

log = logging.getLogger(__name__)

_PATIENCE = 120.0
"""Seconds that the trainer waits for a proxy that restarts."""
_MAX_FAILED_STEPS = 5
_REMEMBERED = 65_536
"""Consumed ids kept: many times what can be finalized and not yet acknowledged."""


class GRPOTrainer:
    """Trains the policy of one run on what external agents do."""

    def __init__(self, config: Config, *, workflow: type[RolloutWorkflow] | None = None) -> None:
        self.config = config
        self.dir = RunDir.of(config.root, config.user, config.experiment, config.trial)
        self._sync = DiskSync(load_timeout=config.engine.load_timeout)
        self._make_workflow = workflow or ProxyWorkflow
        key = config.server.admin_key
        self._executor = RolloutExecutor(
            lambda: Ranks(
                self.dir.registry,
                config.server.ranks,
                admin_key=key.get_secret_value() if key else None,
                retry_for=_PATIENCE,
            ),
            lambda client, owner: self._make_workflow(client, owner=owner),  # type: ignore[call-arg]
            config.rollout,
            owner=f"trainer-{uuid.uuid4().hex[:12]}",
            reject=self._reject,
        )
        self.metrics = TrainerMetrics(lambda: self._executor.rejected)
        self._loss = _loss_config(config)
        self._versions = Versions(self.dir.state)
        self._consumed: dict[str, None] = {}
        self.policy: Policy
        self._tokenizer: Path
        self._saved_step: int | None = None
        self.checkpoint: Path | None = None
        self._failed_steps = 0
        self._stopping = False

    def stop(self) -> None:
        """End after the step under way, with a checkpoint; safe in a signal handler."""
        self._stopping = True
        self._executor.interrupt()

    def train(self) -> bool:
        """Make the configured number of optimizer steps, from the latest checkpoint if any.

        False if it was stopped before.
        """
        resumed = self._load()
        self._executor.start()
        try:
            served = self._executor.call(self._served_version(), timeout=2 * _PATIENCE)
            self._versions.at_least(served)
            self.metrics.now(step=self.policy.steps, version=self._versions.highest)
            if resumed or self.config.engine.urls:
                # An engine that somebody else started may hold any weights.
                self._publish()
            self._tell("training")
            try:
                while self.policy.steps < self.config.train.steps:
                    self._step()
            except InterruptedError:
                log.info("stopped at step %d", self.policy.steps)
            if self._saved_step != self.policy.steps and (self.policy.steps or not self._stopping):
                self._save()
            if not self._stopping:
                self._tell("finished")
            return not self._stopping
        finally:
            self._executor.stop()

    # -- one step ------------------------------------------------------------------------------

    def _step(self) -> None:
        started = time.perf_counter()
        episodes = self._wait()
        waited = time.perf_counter()
        step = self.policy.steps
        batch = training_batch(
            episodes,
            self.config.train,
            step=step,
            eta=self.config.rollout.eta,
            step_of_version=self._versions.steps_of(versions_in(episodes)),
        )
        result = self._optimize(batch)
        trained = time.perf_counter()
        if result is not None:
            self._publish()
        published = time.perf_counter()
        self._consumed.update(dict.fromkeys(batch.trained))
        while len(self._consumed) > _REMEMBERED:
            del self._consumed[next(iter(self._consumed))]
        self._executor.ack(
            batch.trained,
            [Rejection(session_id=id, reason=why) for id, why in batch.rejected.items()],
        )
        self.metrics.settled(batch.trained, batch.rejected)
        if result is None:
            log.warning("no step on a batch: %s", dict(Counter(batch.rejected.values())))
            return
        times = {
            "wait": waited - started,
            "train": trained - waited,
            "publish": published - trained,
        }
        self._report(batch, result, times)
        if self.policy.steps % self.config.train.checkpoint_every == 0:
            self._save()
            self._tell("training")

    def _optimize(self, batch: TrainingBatch) -> StepResult | None:
        """One optimizer step; None where there is nothing to train on, or it is not finite."""
        if not batch.rows:
            return None
        # What a step is about to consume is on disk before it changes anything.
        self._write_manifest(batch)
        try:
            result = self.policy.step(
                micro_batches(batch.rows, self.config.train.micro_batch_tokens),
                count_trained(batch.rows),
                self._loss,
                entropy=True,
            )
        except FloatingPointError as error:
            self._failed_steps += 1
            if self._failed_steps >= _MAX_FAILED_STEPS:
                raise TrainingError(
                    f"{self._failed_steps} steps in a row were not finite, the last one: {error}; "
                    "lower train.lr, or look at the rewards in metrics.jsonl"
                ) from error
            log.error("a batch is left out, the weights are unchanged: %s", error)
            batch.rejected |= dict.fromkeys(batch.trained, "not_finite")
            batch.trained = []
            return None
        self._failed_steps = 0
        return result

    def _wait(self) -> list[Episode]:
        """The next batch, without sessions that were trained on already."""
        while True:
            try:
                episodes = self._executor.prepare_batch(timeout=60.0)
            except TimeoutError as error:
                log.info("waiting for trajectories: %s", error)
                continue
            known = [t.session_id for e in episodes for t in e if t.session_id in self._consumed]
            if not known:
                return episodes
            # Trained on, but their lease was lost before the acknowledgement.
            self._executor.ack(known, [])
            fresh = [[t for t in e if t.session_id not in self._consumed] for e in episodes]
            left = [episode for episode in fresh if episode]
            if left:
                return left

    def _reject(self, episode: Episode) -> str | None:
        if any(t.session_id in self._consumed for t in episode):
            return None
        return without_signal(episode, self.config.train)

    # -- weights, checkpoints, files -----------------------------------------------------------

    def _publish(self) -> None:
        """The policy's weights to the engine, as a version that was never used before."""
        step = self.policy.steps
        version = self._versions.reserve(step)
        dtype = {"float32": None, "bfloat16": torch.bfloat16}[self.config.model.dtype]
        path = publish_to_disk(self.policy, self._tokenizer, self.dir.weights, version, dtype=dtype)
        self._executor.call(
            self._sync.update(self._executor.ranks, path, version=version, step=step),
            timeout=self.config.engine.load_timeout + 5 * _PATIENCE,
        )
        self.metrics.now(step=step, version=version)
        prune(self.dir.weights, self.config.train.keep_weights)

    def _load(self) -> bool:
        """The policy: from the latest checkpoint (True), else from the configured model."""
        c = self.config.train
        _seed(c.seed)
        settings = PolicyConfig(
            lr=c.lr,
            betas=c.betas,
            weight_decay=c.weight_decay,
            grad_clip=c.grad_clip,
            device=_device(c.device),
            threads=c.threads if _device(c.device) == "cpu" else None,
        )
        latest = latest_checkpoint(self.dir.checkpoints)
        if latest is None:
            self.policy = Policy.load(self.config.model.path, settings)
            self._tokenizer = tokenizer_of(self.config.model.path)
            return False
        self.policy, state = load_checkpoint(latest, settings)
        self._tokenizer = latest
        for group in self.policy.optimizer.param_groups:
            # The optimizer's state goes on; its settings are those of this start.
            group.update(lr=c.lr, betas=c.betas, weight_decay=c.weight_decay)
        self._saved_step = self.policy.steps
        self._consumed = dict.fromkeys(state["consumed"])
        self.checkpoint = latest
        log.info("going on from %s (step %d)", latest, self.policy.steps)
        return True

    def _save(self) -> None:
        self.checkpoint = save_checkpoint(
            self.dir.checkpoints,
            self.policy,
            self._tokenizer,
            {"version": self._versions.highest, "consumed": list(self._consumed)},
            keep=self.config.train.keep_checkpoints,
        )
        self._saved_step = self.policy.steps
        self._prune_manifests()
        log.info("checkpoint %s", self.checkpoint)

    def _tell(self, state: Any) -> None:
        checkpoint = str(self.checkpoint) if self.checkpoint else None
        ranks = self._executor.ranks
        self._executor.call(
            ranks.all(
                lambda rank: ranks.clients[rank].set_run(
                    state, step=self.policy.steps, checkpoint=checkpoint
                )
            ),
            timeout=2 * _PATIENCE,
        )

    async def _served_version(self) -> int:
        """The highest version that a rank serves."""
        ranks = self._executor.ranks
        infos = await ranks.all(lambda rank: ranks.clients[rank].run_info())
        return max(info.version for info in infos)

    def _prune_manifests(self) -> None:
        """Keep those that are newer than the oldest checkpoint kept: what a resume gives up."""
        oldest = list_checkpoints(self.dir.checkpoints)[0].step
        for path in self.dir.manifests.glob("step-*.json"):
            if int(path.stem.removeprefix("step-")) <= oldest:
                path.unlink()

    def _write_manifest(self, batch: TrainingBatch) -> None:
        step = self.policy.steps + 1
        write_json(
            self.dir.manifests / f"step-{step:08d}.json",
            {
                "step": step,
                "trained": batch.trained,
                "rejected": batch.rejected,
                "tokens": [int(row["loss_mask"].sum()) for row in batch.rows],
            },
        )

    def _report(self, batch: TrainingBatch, result: StepResult, times: dict[str, float]) -> None:
        now = self._executor.capacity
        line = {
            "time": time.time(),
            "step": self.policy.steps,
            "version": self._versions.highest,
            "reward": sum(batch.scores) / max(1, len(batch.scores)),
            "sessions": len(batch.trained),
            "left_out": dict(Counter(batch.rejected.values())),
            "rejected": dict(self._executor.rejected),
            "interactions": len(batch.rows),
            "staleness_mean": sum(batch.ages) / max(1, len(batch.ages)),
            "staleness_max": max(batch.ages, default=0),
            "grad_norm": result.grad_norm,
            **result.stats.means(),
            "seconds": {key: round(value, 4) for key, value in times.items()},
            "capacity": now.model_dump() if now else None,
        }
        with open(self.dir.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.metrics.stepped(line)
        log.info(
            "step %d: reward %.3f, %d sessions, %d tokens, staleness %.2f, version %d",
            line["step"],
            line["reward"],
            line["sessions"],
            line["tokens"],
            line["staleness_mean"],
            line["version"],
        )


def _loss_config(config: Config) -> LossConfig:
    """The preset's loss with the run's constants."""
    c = config.train
    chosen = replace(preset(c.preset).loss, eps_low=c.eps_low, eps_high=c.eps_high, is_cap=c.is_cap)
    log.debug("loss: %s", asdict(chosen))
    return chosen


def _device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device=cuda, but there is no CUDA device; use cpu or auto")
    return wanted


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
