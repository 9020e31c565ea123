"""Workflows: where a training batch's episodes come from."""

from any_agent.workflow.base import Episode, EpisodeResult, RolloutWorkflow, TensorDict
from any_agent.workflow.grouped import GroupedRolloutWorkflow
from any_agent.workflow.multi_turn import MultiTurnWorkflow
from any_agent.workflow.openai_proxy import AgentService, OpenAIProxyWorkflow
from any_agent.workflow.proxy import ProxyWorkflow
from any_agent.workflow.proxy_client import OpenAIProxyClient
from any_agent.workflow.resolve import WorkflowLike, resolve_workflow
from any_agent.workflow.rlvr import RLVRWorkflow
from any_agent.workflow.tensors import (
    checked_tensors,
    concat_padded_tensors,
    kind_of,
    padded,
    rows_of,
    tensors_of,
    trajectories_of,
)

__all__ = [
    "AgentService",
    "Episode",
    "EpisodeResult",
    "GroupedRolloutWorkflow",
    "MultiTurnWorkflow",
    "OpenAIProxyClient",
    "OpenAIProxyWorkflow",
    "ProxyWorkflow",
    "RLVRWorkflow",
    "RolloutWorkflow",
    "TensorDict",
    "WorkflowLike",
    "checked_tensors",
    "concat_padded_tensors",
    "kind_of",
    "padded",
    "resolve_workflow",
    "rows_of",
    "tensors_of",
    "trajectories_of",
]
