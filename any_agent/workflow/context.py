"""The context of a running workflow's episode, and the HTTP clients that workflows share.

Public as ``any_agent.workflow_context``. The context belongs to the task that an episode runs in,
and to the tasks that it starts: concurrent episodes never see each other's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from any_agent.client.retry_transport import SharedClient, retrying_client
from any_agent.types import GenerationHyperparameters

if TYPE_CHECKING:
    import aiohttp
    import httpx

_CONNECT_TIMEOUT = 30.0
_TIMEOUT = 3600.0  # seconds; a call may wait for a slot, a weight update and thousands of tokens


@dataclass(frozen=True, slots=True)
class WorkflowContext:
    """The context of one episode."""

    task_id: int | str | None = None
    """The task's id, which the executor was given or has chosen."""
    is_eval: bool = False
    version: int = -1
    """The version of the weights when the episode began; -1 outside of a run."""
    temperature: float | None = None
    """The run's sampling temperature (``sampling.temperature``; evaluations have their own)."""
    sampling: GenerationHyperparameters | None = None
    """All sampling parameters of the run, which clients without their own use."""


_NO_EPISODE = WorkflowContext()
_current: ContextVar[WorkflowContext] = ContextVar("any_agent_workflow_context")


def get() -> WorkflowContext:
    """Return the running episode's context; the default one outside of every episode."""
    return _current.get(_NO_EPISODE)


def set(context: WorkflowContext) -> None:
    """Set the context of this task, and of the tasks that it starts from now on."""
    _current.set(context)


@contextmanager
def use(context: WorkflowContext) -> Iterator[WorkflowContext]:
    """Set the context for the time of a ``with`` statement."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


def stat_scope() -> str:
    """Return the name of the episode's statistics tracker: ``rollout``, in evaluations
    ``eval-rollout``."""
    return "eval-rollout" if get().is_eval else "rollout"


_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, SharedClient] = WeakKeyDictionary()


async def get_aiohttp_session() -> aiohttp.ClientSession:
    """Return this event loop's session. Leave it open: it is closed with the executor."""
    import aiohttp

    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        # The executor limits the number of episodes; a limit here would only make them queue.
        session = _sessions[loop] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT, sock_connect=_CONNECT_TIMEOUT),
        )
    return session


async def get_httpx_client() -> httpx.AsyncClient:
    """Return this event loop's client. Leave it open: it is closed with the executor.

    Calls with a session's key wait a bounded time while the service is full or away.
    """
    loop = asyncio.get_running_loop()
    client = _clients.get(loop)
    if client is None or client.is_closed:
        client = _clients[loop] = retrying_client()
    return client


async def close_clients() -> None:
    """Close this event loop's clients; the next caller gets new ones."""
    loop = asyncio.get_running_loop()
    session, client = _sessions.pop(loop, None), _clients.pop(loop, None)
    if session is not None:
        await session.close()
    if client is not None:
        await client.end()
