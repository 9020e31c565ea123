"""The training that a run's folder describes, made once more from the journals.

A manifest only says what a step consumed. Here every step after the oldest checkpoint is made
again by itself, in one go, from the manifests and the recorded interactions; if the weights of
each later checkpoint come out bit for bit, then what the killed and resumed trainer did is that
history and nothing else: no session twice, none left out, no reward other than the recorded one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from any_agent.config import Config
from any_agent.rundir.layout import RunDir
from any_agent.types import Trajectory
from tests.support.e2e.audit import Record
from trainer.batch import training_batch
from trainer.checkpoint import complete_checkpoints, load_checkpoint
from trainer.from_config import loss_config
from trainer.manifests import Manifest, ManifestStore
from trainer.model import PolicyConfig
from trainer.policy import Policy
from trainer.updates import StepConfig


def retrain(config: Config, run: RunDir, records: Mapping[str, Record]) -> tuple[int, list[str]]:
    """(checkpoints that were compared, those that came out otherwise)."""
    transformers.utils.logging.disable_progress_bar()
    (_, oldest), *later = complete_checkpoints(run.checkpoints).items()
    policy, _ = load_checkpoint(oldest, PolicyConfig(threads=config.train.threads))
    manifests = ManifestStore(run.manifests)
    out = []
    for last, path in later:
        for step in range(policy.steps + 1, last + 1):
            _make(policy, config, manifests.read(step), records)
        if name := _difference(policy, path):
            out.append(f"{path.name}: {name} is another")
    return len(later), out


def _make(policy: Policy, config: Config, taken: Manifest, records: Mapping[str, Record]) -> None:
    c = config.train.model_copy(update=taken.settings)
    batch = training_batch(
        [[_trajectory(records[id]) for id in group] for group in taken.groups],
        c,
        step=taken.step - 1,
        eta=taken.eta,
        step_of_version=taken.versions,
    )
    policy.train(
        batch.rows,
        c.micro_batch_tokens,
        loss_config(c),
        StepConfig(c.epochs_per_batch, c.lr, c.betas, c.weight_decay, c.grad_clip),
        batch.minibatches,
    )


def _trajectory(record: Record) -> Trajectory:
    row = record.row
    return Trajectory(
        row.id, row.group_id or row.id, record.interactions, final_reward=row.final_reward
    )


def _difference(policy: Policy, checkpoint: Path) -> str | None:
    """The first tensor that is not the checkpoint's, bit for bit."""
    saved = load_file(checkpoint / "model.safetensors")
    made = policy.model.state_dict()
    for name, tensor in saved.items():
        if not torch.equal(tensor, made[name]):
            return name
    return None
