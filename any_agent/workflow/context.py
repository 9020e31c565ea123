"""What a running workflow knows of its own episode, and the HTTP clients that workflows share.

Public as ``any_agent.workflow_context``. The context belongs to the task that an episode runs in,
and to the tasks that it starts: episodes that run side by side never see each other's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from any_agent.client.retry_transport import SharedClient, retrying_client
from any_agent.workflow.episode_context import WorkflowContext, get, set, use

if TYPE_CHECKING:
    import aiohttp
    import httpx

__all__ = [
    "WorkflowContext",
    "close_clients",
    "get",
    "get_aiohttp_session",
    "get_httpx_client",
    "set",
    "stat_scope",
    "use",
]

_CONNECT = 30.0
_TOTAL = 3600.0
"""Seconds; a call may wait for a place, a weight update and thousands of tokens."""


def stat_scope() -> str:
    """The name of the tracker that the episode's figures belong to: ``rollout``, in evaluations
    ``eval-rollout``."""
    return "eval-rollout" if get().is_eval else "rollout"


@dataclass(slots=True)
class _Clients:
    aiohttp: aiohttp.ClientSession | None = None
    httpx: SharedClient | None = None


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
        mine.httpx = retrying_client()
    return mine.httpx


async def close_clients() -> None:
    """Close those of this event loop; the next one that asks gets new ones."""
    mine = _clients.pop(asyncio.get_running_loop(), None)
    if mine is None:
        return
    if mine.aiohttp is not None:
        await mine.aiohttp.close()
    if mine.httpx is not None:
        await mine.httpx.end()
