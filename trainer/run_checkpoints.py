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
from trainer.parallel.trainer_group import drop_frozen, load_frozen, load_policy
from trainer.policy import Policy
from trainer.reference import SETTINGS, require_same_tokens
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
        self.frozen: dict[str, dict[str, Any]] = {}
        """The name and the weights of the reference model and the teacher that are loaded, as
        JSON."""
        self._saved_frozen: dict[str, dict[str, Any]] = {}
        """The same of the checkpoint's last steps that had them."""
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
        self._saved_frozen = {role: one for role in SETTINGS if (one := state.get(role))}
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

    def load_frozen(
        self,
        policy: Policy,
        wanted: Mapping[str, str],
        recorded: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Give the policy the wanted reference model and teacher, by their roles, by default the
        model that training began with.

        Raises ConfigError if its weights are others than those ``recorded`` by a step, or by the
        checkpoint. A model with another name may have other weights.
        """
        for role, given in wanted.items():
            name, setting = given or self._config.model.path, SETTINGS[role]
            if role not in self.frozen or self.frozen[role]["name"] != name:
                self.frozen.pop(role, None)
                require_same_tokens(setting, name, self._config.model.path)
                load_frozen(policy, role, name)
                self.frozen[role] = {"name": name, **asdict(self._weights(policy, name))}
            weights = BaseWeights(self.frozen[role]["path"], self.frozen[role]["crc32"])
            for saved in filter(None, ((recorded or {}).get(role), self._saved_frozen.get(role))):
                if saved["name"] == name or saved["path"] == weights.path:
                    what = f"{setting}={name}: the trial's last steps had"
                    weights.require_same(saved, what)

    def _weights(self, policy: Policy, model: str) -> BaseWeights:
        """Return a model's weights; those that the run began with are not read again."""
        known = BaseWeights(**self.origin["weights"]) if self.origin else policy.base
        return known if known is not None and known.is_at(model) else BaseWeights.of(model)

    def drop_frozen(self, policy: Policy, wanted: Mapping[str, str]) -> None:
        """Free the memory of a reference model or teacher that is not wanted."""
        for role in SETTINGS.keys() - wanted.keys():
            drop_frozen(policy, role)
            self.frozen.pop(role, None)

    def save(self, policy: Policy, state: Mapping[str, Any]) -> None:
        """Write a checkpoint, and remove the oldest ones; a full disk is waited out."""
        keep = self._config.train.keep_checkpoints
        self.latest = self._disk.write(
            lambda: save_checkpoint(
                *(self._folder, policy, self.tokenizer),
                {**state, **self._saved_frozen, **self.frozen},
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
