"""`RolloutWorkflow`: the interface that a researcher implements to produce episodes."""

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
"""The result of an episode; None instead rejects the episode."""


class RolloutWorkflow(ABC):
    """Produces episodes, many of them concurrently: one object serves them all, so the state of an
    episode belongs into local variables."""

    @abstractmethod
    async def arun_episode(
        self, engine: RolloutEngine, data: dict[str, Any]
    ) -> EpisodeResult | None:
        """Run one episode on an item of the dataset.

        Return a dictionary of tensors, interactions by their ids (as
        ``EngineOpenAI.export_interactions`` returns them), trajectories, or None to reject the
        episode, which is not trained on then. An error ends this episode alone. The method must
        stop at once when cancelled, and must not block the event loop, which it shares.
        """
