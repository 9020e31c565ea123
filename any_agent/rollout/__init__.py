"""Running workflows: admission by staleness, long polls, batches."""

from any_agent.rollout.executor import Consumed, RolloutExecutor
from any_agent.rollout.ranks import Ranks
from any_agent.rollout.staleness import free_slots

__all__ = ["Consumed", "Ranks", "RolloutExecutor", "free_slots"]
