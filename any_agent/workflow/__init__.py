"""Workflows: where a training batch's episodes come from."""

from any_agent.workflow.base import Episode, RolloutWorkflow
from any_agent.workflow.proxy import ProxyWorkflow

__all__ = ["Episode", "ProxyWorkflow", "RolloutWorkflow"]
