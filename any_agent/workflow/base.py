"""The interface that a researcher implements to produce episodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

from any_agent.engine import InferenceEngine
from any_agent.types import Trajectory

Episode: TypeAlias = list[Trajectory]
"""The trajectories of one episode: one, or a whole group."""


class RolloutWorkflow(ABC):
    """Produces one episode at a time; the executor runs many concurrently."""

    @abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any] | None
    ) -> Episode | None:
        """One episode on an item of the dataset (None where there is none).

        None rejects the episode: it is not trained on. It must stop at once when cancelled.
        """
