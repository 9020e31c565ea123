"""Running workflows: admission by staleness, long polls, batches."""

from any_agent.rollout.executor import RolloutExecutor
from any_agent.rollout.ranks import Ranks
from any_agent.rollout.staleness import free_slots

__all__ = ["Ranks", "RolloutExecutor", "free_slots"]
