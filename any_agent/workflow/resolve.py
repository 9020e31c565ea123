"""From what a script names as its workflow to the object that runs episodes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any, TypeAlias

from any_agent.client.environment import PLACEHOLDER_KEY
from any_agent.errors import ConfigError
from any_agent.runtime.import_string import import_string
from any_agent.workflow.agent_service import AgentService
from any_agent.workflow.base import RolloutWorkflow
from any_agent.workflow.grouped import GroupedRolloutWorkflow

_KEYS = ("ANY_AGENT_SERVER__ADMIN_KEY", "OPENAI_API_KEY")
"""Variables that may hold the key of a service that is named by its URL alone."""

WorkflowLike: TypeAlias = Any
"""A :class:`RolloutWorkflow`, a class of them, an agent (an object or a class with ``async def
run(data, **extra_kwargs)``), or the dotted name of any of them."""


def resolve_workflow(
    workflow: WorkflowLike,
    workflow_kwargs: Mapping[str, Any] | None = None,
    group_size: int = 1,
    proxy_addr: str | None = None,
    *,
    agents: AgentService | None = None,
) -> RolloutWorkflow:
    """The workflow that is meant, made with ``workflow_kwargs`` where it is a class.

    An agent is wrapped: its calls go to the service that ``agents`` says, or to the one at the URL
    ``proxy_addr``, with the key of ANY_AGENT_SERVER__ADMIN_KEY or else OPENAI_API_KEY. With a
    ``group_size`` above 1 each episode is that many runs.

    Raises ConfigError, which says what is wrong with the name, the class or its arguments.
    """
    kwargs = dict(workflow_kwargs or {})
    found = require_workflow(workflow, kwargs)
    if inspect.isclass(found):
        found = found(**kwargs)
    if not isinstance(found, RolloutWorkflow):
        if agents is None and proxy_addr is not None:
            agents = AgentService(proxy_addr, _key_of_environment())
        found = _agent(found, _named(workflow), agents)
    return found if group_size == 1 else GroupedRolloutWorkflow(found, group_size)


def require_workflow(workflow: WorkflowLike, kwargs: Mapping[str, Any] | None = None) -> Any:
    """The class or object that is meant, which nothing is made of yet.

    Raises ConfigError as :func:`resolve_workflow`.
    """
    if workflow is None:
        raise ConfigError(
            "no workflow is named: give an agent or a RolloutWorkflow, a class or an object of "
            "it, or its dotted name, as in 'my_agent.MyAgent'"
        )
    found = import_string(workflow) if isinstance(workflow, str) else workflow
    _require_made(found, kwargs or {}, _named(workflow))
    return found


def _named(workflow: WorkflowLike) -> str:
    return f"workflow {workflow!r}" if isinstance(workflow, str) else f"workflow {_name(workflow)}"


def _require_made(found: Any, kwargs: Mapping[str, Any], named: str) -> None:
    """ConfigError unless it is a workflow or an agent, or a class that makes one of these."""
    _require_run(found, named)
    if not inspect.isclass(found):
        if kwargs:
            raise ConfigError(
                f"{named} is an object, not a class: workflow_kwargs ({', '.join(kwargs)}) have "
                "nothing to be given to"
            )
        return
    try:
        inspect.signature(found).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{named}: workflow_kwargs do not fit {found.__name__}: {error}"
        ) from None
    except ValueError:
        pass  # A class of C without a signature says itself what it misses.


def _require_run(found: Any, named: str) -> None:
    """ConfigError unless it is a workflow, or has a method ``run``."""
    if isinstance(found, RolloutWorkflow) or (
        inspect.isclass(found) and issubclass(found, RolloutWorkflow)
    ):
        method = found.arun_episode
        if inspect.isabstract(found) or not _awaitable(method):
            raise ConfigError(
                f"{named} runs no episodes: write async def arun_episode(self, engine, data) in it"
            )
        return
    if not callable(getattr(found, "run", None)):
        raise ConfigError(
            f"{named} is neither a RolloutWorkflow nor an agent: it has no run method. Write "
            "async def run(self, data, **extra_kwargs) in it, which returns the reward"
        )


def _awaitable(method: Any) -> bool:
    """False for what is a plain function for certain."""
    method = inspect.unwrap(method)
    plain = inspect.isfunction(method) or inspect.ismethod(method)
    return not plain or inspect.iscoroutinefunction(method)


def _agent(found: Any, named: str, agents: AgentService | None) -> RolloutWorkflow:
    if agents is None:
        raise ConfigError(
            f"{named} is an agent, whose calls need a service to go to: run it in a trainer, or "
            "give its URL (proxy_addr) or an AgentService"
        )
    from any_agent.workflow.openai_proxy import OpenAIProxyWorkflow

    return OpenAIProxyWorkflow.of(found, agents)


def _key_of_environment() -> str | None:
    found = next((os.environ[name] for name in _KEYS if os.environ.get(name)), None)
    return None if found == PLACEHOLDER_KEY else found


def _name(workflow: Any) -> str:
    kind = workflow if inspect.isclass(workflow) else type(workflow)
    return f"{kind.__module__}.{kind.__qualname__}"
