"""What a running workflow knows of its own episode, and the HTTP clients that workflows share.

Public as ``any_agent.workflow_context``. The context belongs to the task that an episode runs in,
and to the tasks that it starts: episodes that run side by side never see each other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from any_agent.workflow.patience import patient_client

if TYPE_CHECKING:
    import aiohttp
    import httpx

_CONNECT = 30.0
_TOTAL = 3600.0
"""Seconds; a call may wait for a place, a weight update and thousands of tokens."""


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


def stat_scope() -> str:
    """The name of the tracker that the episode's figures belong to: ``rollout``, in evaluations
    ``eval-rollout``."""
    return "eval-rollout" if get().is_eval else "rollout"


@dataclass(slots=True)
class _Clients:
    aiohttp: aiohttp.ClientSession | None = None
    httpx: httpx.AsyncClient | None = None


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Clients] = WeakKeyDictionary()


async def get_aiohttp_session() -> aiohttp.ClientSession:
    """The one of this event loop; it is closed with the executor, so leave it open."""
    import aiohttp

    mine = _clients.setdefault(asyncio.get_running_loop(), _Clients())
    if mine.aiohttp is None or mine.aiohttp.closed:
        # The executor bounds how many episodes run; a bound here would only make them queue.
        mine.aiohttp = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_TOTAL, sock_connect=_CONNECT),
        )
    return mine.aiohttp


async def get_httpx_client() -> httpx.AsyncClient:
    """The one of this event loop; it is closed with the executor, so leave it open.

    Calls that carry a session's key wait while the service is full or away, for a bounded time.
    """
    mine = _clients.setdefault(asyncio.get_running_loop(), _Clients())
    if mine.httpx is None or mine.httpx.is_closed:
        mine.httpx = patient_client()
    return mine.httpx


async def close_clients() -> None:
    """Close those of this event loop; the next one that asks gets new ones."""
    mine = _clients.pop(asyncio.get_running_loop(), None)
    if mine is None:
        return
    if mine.aiohttp is not None:
        await mine.aiohttp.close()
    if mine.httpx is not None:
        await mine.httpx.aclose()
