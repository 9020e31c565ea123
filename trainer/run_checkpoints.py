"""The checkpoints of a run: the one that a start continues from, and those that it writes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from any_agent.config import Config
from any_agent.errors import ConfigError
from any_agent.rundir.layout import RunDir
from any_agent.runtime.disk_space import DiskSpace
from trainer.adapter_files import record, require_same_model, require_same_settings
from trainer.checkpoint import (
    checkpoint_bytes,
    complete_checkpoints,
    latest_checkpoint,
    save_checkpoint,
)
from trainer.command_channel import Leader
from trainer.from_config import policy_config, seed_all
from trainer.lora import BaseWeights
from trainer.parallel.trainer_group import drop_reference, load_policy, load_reference
from trainer.policy import Policy
from trainer.reference import require_same_tokens
from trainer.weight_folders import tokenizer_of

log = logging.getLogger(__name__)


class RunCheckpoints:
    """Loads a run's policy, and saves it."""

    tokenizer: Path
    """The folder with the tokenizer of what is published and saved."""

    def __init__(self, config: Config, run_dir: RunDir, disk: DiskSpace) -> None:
        self._config = config
        self._folder = run_dir.checkpoints
        self._disk = disk
        self.latest: Path | None = None
        self.step: int | None = None
        """The step of the latest checkpoint."""
        self.reference: dict[str, Any] | None = None
        """The name and the weights of the reference model that is loaded, as JSON."""
        self._saved_reference: dict[str, Any] | None = None
        """The same of the checkpoint's last steps that had one."""
        self.origin: dict[str, Any] | None = None
        """The seed, weights and adapter that training began with, as JSON; None where it began with
        a checkpoint."""
        self.dataset: Mapping[str, Any] | None = None
        """The batches' source as the latest checkpoint has it."""

    def load(self, leader: Leader | None) -> tuple[Policy, Mapping[str, Any] | None]:
        """Load the policy from the latest checkpoint, with its state, else from the model."""
        c = self._config.train
        seed_all(c.seed)
        self.latest = latest = latest_checkpoint(self._folder)
        model = self._config.model.path
        policy, state = load_policy(
            *(latest or model, policy_config(c), leader),
            checkpoint=latest is not None,
            base=model or None,
        )
        self.tokenizer = latest or tokenizer_of(model)
        if latest is None:
            weights = asdict(policy.base or BaseWeights.of(model))
            self.origin = {"seed": c.seed, "weights": weights, "adapter": record(policy)}
            return policy, None
        self.step = policy.steps
        self._saved_reference = state.get("reference")
        return policy, state

    def require_same_origin(
        self, where: str, saved: Mapping[str, Any] | None, policy: Policy
    ) -> None:
        """Raise ConfigError unless a step, whose record is ``saved``, can be repeated from here."""
        now = self.origin
        if saved is None or now is None:
            return
        require_same_settings(where, saved["adapter"], policy.config.lora)
        if saved["adapter"] is not None:
            require_same_model(where, saved["adapter"], policy)
        weights = BaseWeights(**now["weights"])
        weights.require_same(saved["weights"], f"{where} was trained from")
        if saved["seed"] != now["seed"]:
            raise ConfigError(
                f"{where} was trained with train.seed={saved['seed']}, and train.seed="
                f"{now['seed']}: set train.seed={saved['seed']}, or choose another --trial"
            )

    def load_reference(
        self, policy: Policy, name: str, recorded: Mapping[str, Any] | None = None
    ) -> None:
        """Give the policy a reference model, by default the one that training began with.

        Raises ConfigError if its weights are others than those ``recorded`` by a step, or by the
        checkpoint. A model with another name may have other weights.
        """
        name = name or self._config.model.path
        if self.reference is None or self.reference["name"] != name:
            self.reference = None
            require_same_tokens(name, self._config.model.path)
            load_reference(policy, name)
            self.reference = {"name": name, **asdict(self._weights(policy, name))}
        weights = BaseWeights(self.reference["path"], self.reference["crc32"])
        for saved in filter(None, (recorded, self._saved_reference)):
            if saved["name"] == name or saved["path"] == weights.path:
                what = f"train.reference_model={name}: the trial's last steps had"
                weights.require_same(saved, what)

    def _weights(self, policy: Policy, model: str) -> BaseWeights:
        """Return a model's weights; those that the run began with are not read again."""
        known = BaseWeights(**self.origin["weights"]) if self.origin else policy.base
        return known if known is not None and known.is_at(model) else BaseWeights.of(model)

    def drop_reference(self, policy: Policy) -> None:
        """Free the memory of a reference model."""
        drop_reference(policy)
        self.reference = None

    def save(self, policy: Policy, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, and remove the oldest ones; a full disk is waited out."""
        keep = self._config.train.keep_checkpoints
        self.latest = self._disk.write(
            lambda: save_checkpoint(
                *(self._folder, policy, self.tokenizer),
                {**state, "reference": self.reference or self._saved_reference},
                keep=keep,
            ),
            self._folder,
            f"the checkpoint of step {policy.steps}",
            lambda: checkpoint_bytes(policy),
        )
        # The checkpoint that the policy came from may just have been pruned.
        self.tokenizer = self.latest
        self.step, self.dataset = policy.steps, state.get("dataset")
        log.info("wrote checkpoint %s", self.latest)

    @property
    def oldest_step(self) -> int | None:
        """The step of the oldest checkpoint."""
        return min(complete_checkpoints(self._folder), default=None)
