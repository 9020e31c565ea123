"""From leased trajectories to the rows of one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from any_agent.config import TrainConfig
from any_agent.record import InteractionTree, discarded, interaction_row, propagate_rewards
from any_agent.record import to_tensors as row_to_tensors
from any_agent.types import Trajectory
from any_agent.workflow import Episode
from trainer.advantage import SessionRewards, group_advantages
from trainer.packing import Row, mask_stale, with_training_signal


@dataclass(slots=True)
class TrainingBatch:
    """Rows of one step, and what its sessions came to."""

    rows: list[Row] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    """Sessions with at least one token in the loss."""
    rejected: dict[str, str] = field(default_factory=dict)
    """Sessions without one, and why: `stale` (they count in their baseline) or `untrainable`."""
    scores: list[float] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    """Optimizer steps between each trained token's version and now."""


def session_rewards(trajectory: Trajectory, discount: float) -> SessionRewards:
    """r of each interaction after it ran back through the tree, and whether it counts."""
    nodes = trajectory.interactions
    r = propagate_rewards(nodes, discount=discount, final_reward=trajectory.final_reward)
    gone = discarded(nodes)
    return SessionRewards(
        rewards=[r[node.id] for node in nodes],
        counted=[node.trainable and node.id not in gone for node in nodes],
    )


def without_signal(episode: Episode, config: TrainConfig) -> str | None:
    """Why an episode teaches nothing, or None: its sessions all have the same score."""
    rewards = [session_rewards(trajectory, config.discount) for trajectory in episode]
    if all(r.score is None for r in rewards):
        return "untrainable"
    (group,) = group_advantages([rewards], normalize_std=config.normalize_std)
    return "zero_variance" if group.zero_variance else None


def training_batch(
    episodes: Sequence[Episode],
    config: TrainConfig,
    *,
    step: int,
    eta: int,
    step_of_version: Mapping[int, int],
) -> TrainingBatch:
    """Advantages over the groups, then one row per counted interaction, stale tokens masked."""
    rewards = [[session_rewards(t, config.discount) for t in episode] for episode in episodes]
    groups = group_advantages(rewards, normalize_std=config.normalize_std)
    batch = TrainingBatch()
    for episode, group_rewards, group in zip(episodes, rewards, groups, strict=True):
        for t, r, advantages, score in zip(
            episode, group_rewards, group.advantages, group.scores, strict=True
        ):
            if score is not None:
                batch.scores.append(score)
            rows = _rows(t, r, advantages)
            fresh = [
                mask_stale(row, step_of_version=step_of_version, step=step, eta=eta) for row in rows
            ]
            left = [row for row in fresh if bool(row["loss_mask"].any())]
            batch.rows += left
            for row in left:
                trained = row["versions"][row["loss_mask"].bool()].tolist()
                batch.ages += [step - step_of_version[version] for version in trained]
            if left:
                batch.trained.append(t.session_id)
            else:
                batch.rejected[t.session_id] = "stale" if rows else "untrainable"
    return batch


def versions_in(episodes: Sequence[Episode]) -> set[int]:
    """Every version that sampled one of their tokens."""
    return {
        int(version)
        for episode in episodes
        for trajectory in episode
        for node in trajectory.interactions
        for version in np.unique(node.output_versions)
    }


def _rows(
    trajectory: Trajectory, rewards: SessionRewards, advantages: Sequence[float]
) -> list[Row]:
    tree = InteractionTree.from_interactions(trajectory.interactions)
    rows = []
    for node, counted, advantage, r in zip(
        trajectory.interactions, rewards.counted, advantages, rewards.rewards, strict=True
    ):
        if not counted:
            continue
        row: dict[str, Tensor] = row_to_tensors(interaction_row(tree, node.id, r))
        temperature = node.gconfig.temperature
        rows.append(with_training_signal(row, advantage=advantage, temperature=temperature))
    return rows
