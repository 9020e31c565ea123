"""Which episode the running task belongs to: what :mod:`any_agent.workflow_context` hands out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from any_agent.types import GenerationHyperparameters


@dataclass(frozen=True, slots=True)
class WorkflowContext:
    """Of one episode."""

    task_id: int | str | None = None
    """As the executor was given it, or gave it."""
    is_eval: bool = False
    version: int = -1
    """Of the weights when the episode began; -1 outside of a run."""
    temperature: float | None = None
    """What the run samples at (``sampling.temperature``, in evaluations their own)."""
    sampling: GenerationHyperparameters | None = None
    """All of what the run samples with; of clients that were made without one it is theirs."""


_OF_NOBODY = WorkflowContext()
_current: ContextVar[WorkflowContext] = ContextVar("any_agent_workflow_context")


def get() -> WorkflowContext:
    """The running episode's; outside of one that of nobody."""
    return _current.get(_OF_NOBODY)


def set(context: WorkflowContext) -> None:
    """From now on in this task, and in the tasks that it starts."""
    _current.set(context)


@contextmanager
def use(context: WorkflowContext) -> Iterator[WorkflowContext]:
    """For the time of a ``with`` statement."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
