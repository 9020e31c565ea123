"""Executors that run workflows for a trainer: admission by staleness, long polls, batches."""

from any_agent.rollout.admission import free_slots as free_slots
from any_agent.rollout.lease_executor import Consumed as Consumed
from any_agent.rollout.lease_executor import LeaseExecutor as LeaseExecutor
from any_agent.rollout.rank_clients import RankClients as RankClients
from any_agent.rollout.rank_clients import engine_urls as engine_urls
from any_agent.rollout.workflow_executor import WorkflowExecutor as WorkflowExecutor
