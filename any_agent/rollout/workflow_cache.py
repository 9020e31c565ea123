"""Workflows that a script names by a class or a string, made once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from any_agent.errors import ConfigError
from any_agent.workflow import RolloutWorkflow
from any_agent.workflow.agent_service import AgentService
from any_agent.workflow.grouped import GroupedRolloutWorkflow
from any_agent.workflow.resolve import WorkflowLike, resolve_workflow

_REMEMBERED = 16


class WorkflowCache:
    """Makes workflows; the same name or class with the same arguments gives the same object.

    It may own processes, so that one for each item of a dataset would be too many.
    """

    def __init__(self, agents: AgentService | None) -> None:
        self._agents = agents
        self._made: deque[tuple[Any, dict[str, Any], RolloutWorkflow]] = deque(maxlen=_REMEMBERED)

    def get(
        self, workflow: WorkflowLike, kwargs: Mapping[str, Any] | None, group_size: int
    ) -> tuple[RolloutWorkflow, int]:
        """The workflow of one run, and how many runs an item gets; ConfigError for what is none."""
        if not isinstance(group_size, int) or group_size < 1:
            raise ConfigError(f"group_size is {group_size!r}: it must be a whole number from 1 on")
        given = dict(kwargs or {})
        made = self._known(workflow, given)
        if made is None:
            made = resolve_workflow(workflow, given, agents=self._agents)
            self._made.append((workflow, given, made))
        if isinstance(made, GroupedRolloutWorkflow):
            return made.workflow, group_size * made.group_size
        return made, group_size

    def _known(self, workflow: WorkflowLike, given: dict[str, Any]) -> RolloutWorkflow | None:
        for named, kwargs, made in self._made:
            same = is_same(named, workflow) and kwargs.keys() == given.keys()
            if same and all(kwargs[name] is value for name, value in given.items()):
                return made
        return None


def is_same(one: WorkflowLike, other: WorkflowLike) -> bool:
    """Whether two name the same workflow."""
    return one is other or (isinstance(one, str) and one == other)
