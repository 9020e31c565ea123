"""`resolve_workflow`: the object that runs episodes, from the workflow that a script names."""

from __future__ import annotations

import inspect
import os
from collections import deque
from collections.abc import Mapping
from typing import Any, TypeAlias

from any_agent.client.environment import PLACEHOLDER_KEY
from any_agent.errors import ConfigError
from any_agent.runtime.import_string import import_string, name_of
from any_agent.workflow.base import RolloutWorkflow
from any_agent.workflow.grouped import GroupedRolloutWorkflow
from any_agent.workflow.openai_proxy import AgentService, OpenAIProxyWorkflow

_KEYS = ("ANY_AGENT_SERVER__ADMIN_KEY", "OPENAI_API_KEY")
"""Variables that may hold the key of a service that is named by its URL alone."""
_MAX_CACHED = 16

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
    """Return the named workflow; a class is instantiated with ``workflow_kwargs``.

    An agent is wrapped: its calls go to the service ``agents``, or to the one at the URL
    ``proxy_addr``, with the key in ANY_AGENT_SERVER__ADMIN_KEY or else OPENAI_API_KEY. With a
    ``group_size`` above 1 each episode is that many runs.

    Raises ConfigError for an invalid name, class or argument.
    """
    kwargs = dict(workflow_kwargs or {})
    found = require_workflow(workflow, kwargs)
    if inspect.isclass(found):
        found = found(**kwargs)
    if not isinstance(found, RolloutWorkflow):
        if agents is None and proxy_addr is not None:
            key = next((os.environ[name] for name in _KEYS if os.environ.get(name)), None)
            agents = AgentService(proxy_addr, None if key == PLACEHOLDER_KEY else key)
        if agents is None:
            raise ConfigError(
                f"{_label(workflow)} is an agent, whose calls need a service: run it in a trainer, "
                "or give the service's URL (proxy_addr) or an AgentService"
            )
        found = OpenAIProxyWorkflow.of(found, agents)
    return found if group_size == 1 else GroupedRolloutWorkflow(found, group_size)


def require_workflow(workflow: WorkflowLike, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Return the named class or object, and instantiate nothing yet.

    Raises ConfigError as :func:`resolve_workflow`.
    """
    if workflow is None:
        raise ConfigError(
            "no workflow is named: give an agent or a RolloutWorkflow, a class or an object of "
            "it, or its dotted name, as in 'my_agent.MyAgent'"
        )
    found = import_string(workflow) if isinstance(workflow, str) else workflow
    _require_instantiable(found, kwargs or {}, _label(workflow))
    return found


def _label(workflow: WorkflowLike) -> str:
    named = repr(workflow) if isinstance(workflow, str) else name_of(workflow)
    return f"workflow {named}"


def _require_instantiable(found: Any, kwargs: Mapping[str, Any], named: str) -> None:
    """Raise ConfigError unless it is a workflow, an agent, or a class of one of these."""
    _require_run(found, named)
    if not inspect.isclass(found):
        if kwargs:
            raise ConfigError(
                f"{named} is an object, not a class: there is no class to "
                f"pass workflow_kwargs ({', '.join(kwargs)}) to"
            )
        return
    try:
        inspect.signature(found).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{named}: workflow_kwargs do not fit {found.__name__}: {error}"
        ) from None
    except ValueError:
        pass  # A class of C without a signature raises its own error for missing arguments.


def _require_run(found: Any, named: str) -> None:
    """Raise ConfigError unless it is a workflow, or has a method ``run``."""
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
    """Return False only for a method that is certainly no coroutine function."""
    method = inspect.unwrap(method)
    plain = inspect.isfunction(method) or inspect.ismethod(method)
    return not plain or inspect.iscoroutinefunction(method)


class WorkflowCache:
    """Resolves workflows; the same name or class with the same arguments gives the same object.

    A workflow may own processes, so that one for each item of a dataset would be too many.
    """

    def __init__(self, agents: AgentService | None) -> None:
        self._agents = agents
        self._cached: deque[tuple[Any, dict[str, Any], RolloutWorkflow]] = deque(maxlen=_MAX_CACHED)

    def get(
        self, workflow: WorkflowLike, kwargs: Mapping[str, Any] | None, group_size: int
    ) -> tuple[RolloutWorkflow, int]:
        """Return the workflow of one run, and the number of runs of an item; ConfigError for an
        object that is no workflow."""
        if not isinstance(group_size, int) or group_size < 1:
            raise ConfigError(f"group_size is {group_size!r}: it must be a whole number from 1 on")
        arguments = dict(kwargs or {})
        known = (
            cached
            for named, other, cached in self._cached
            if is_same(named, workflow)
            and other.keys() == arguments.keys()
            and all(other[name] is value for name, value in arguments.items())
        )
        resolved = next(known, None)
        if resolved is None:
            resolved = resolve_workflow(workflow, arguments, agents=self._agents)
            self._cached.append((workflow, arguments, resolved))
        if isinstance(resolved, GroupedRolloutWorkflow):
            return resolved.workflow, group_size * resolved.group_size
        return resolved, group_size


def is_same(one: WorkflowLike, other: WorkflowLike) -> bool:
    """Return True if both name the same workflow."""
    return one is other or (isinstance(one, str) and one == other)
