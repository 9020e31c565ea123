"""Workflows: the sources of a training batch's episodes."""

from any_agent.workflow.base import Episode as Episode
from any_agent.workflow.base import EpisodeResult as EpisodeResult
from any_agent.workflow.base import RolloutWorkflow as RolloutWorkflow
from any_agent.workflow.base import TensorDict as TensorDict
from any_agent.workflow.built_in import MultiTurnWorkflow as MultiTurnWorkflow
from any_agent.workflow.built_in import RLVRWorkflow as RLVRWorkflow
from any_agent.workflow.grouped import GroupedRolloutWorkflow as GroupedRolloutWorkflow
from any_agent.workflow.openai_proxy import AgentService as AgentService
from any_agent.workflow.openai_proxy import OpenAIProxyWorkflow as OpenAIProxyWorkflow
from any_agent.workflow.proxy import ProxyWorkflow as ProxyWorkflow
from any_agent.workflow.proxy_client import OpenAIProxyClient as OpenAIProxyClient
from any_agent.workflow.resolve import WorkflowLike as WorkflowLike
from any_agent.workflow.resolve import resolve_workflow as resolve_workflow
from any_agent.workflow.tensors import checked_tensors as checked_tensors
from any_agent.workflow.tensors import concat_padded_tensors as concat_padded_tensors
from any_agent.workflow.tensors import kind_of as kind_of
from any_agent.workflow.tensors import padded as padded
from any_agent.workflow.tensors import rows_of as rows_of
from any_agent.workflow.tensors import tensors_of as tensors_of
