"""The interface that a researcher implements to produce episodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeAlias

from any_agent.engine import RolloutEngine
from any_agent.record import InteractionWithTokenLogpReward
from any_agent.types import Trajectory

if TYPE_CHECKING:
    import torch

Episode: TypeAlias = list[Trajectory]
"""Recorded sessions: one, or a whole group."""
TensorDict: TypeAlias = "dict[str, torch.Tensor]"
"""A batch of sequences, padded on the right (:mod:`any_agent.workflow.tensor_checks`)."""
EpisodeResult: TypeAlias = (
    "dict[str, torch.Tensor] | dict[str, InteractionWithTokenLogpReward] | list[Trajectory]"
)
"""What an episode may return; instead of it None, which rejects the episode."""


class RolloutWorkflow(ABC):
    """Produces one episode at a time; the executor runs many concurrently.

    One object serves all of them: what belongs to an episode belongs into local variables.
    """

    @abstractmethod
    async def arun_episode(
        self, engine: RolloutEngine, data: dict[str, Any]
    ) -> EpisodeResult | None:
        """One episode on an item of the dataset.

        It may return a dictionary of tensors, interactions by their ids (as
        ``EngineOpenAI.export_interactions`` gives them), or trajectories. None rejects the
        episode: it is not trained on. Whatever it raises costs this episode alone. It must stop
        at once when cancelled, and must not block the event loop, which it shares.
        """
