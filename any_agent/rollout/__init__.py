"""Executors that run workflows for a trainer: admission by staleness, long polls, batches."""

from any_agent.rollout.admission import free_slots
from any_agent.rollout.lease_executor import Consumed, LeaseExecutor
from any_agent.rollout.rank_clients import RankClients, engine_urls
from any_agent.rollout.workflow_executor import WorkflowExecutor

__all__ = [
    "Consumed",
    "LeaseExecutor",
    "RankClients",
    "WorkflowExecutor",
    "engine_urls",
    "free_slots",
]
