"""Episodes of external agents: blocks until they finalize, then takes what was recorded."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from any_agent.client.rl_client import RLClient
from any_agent.config import SECRET_VARIABLES
from any_agent.engine import RolloutEngine
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.record import unpack_trajectories
from any_agent.workflow.base import Episode, RolloutWorkflow

_POLL_HERE = 5.0
"""Seconds after which slots are reckoned anew, where an app of this process is asked."""


class ProxyApp(Protocol):
    """A rank's app in this process, as `proxy_ext.app.create_app` makes it."""

    waiting: Counter[str]

    @property
    def engine(self) -> Any: ...

    async def lease(self, *, owner: str, wait: float) -> bytes | None: ...

    async def ack(self, *, owner: str, trained: list[str], rejected: list[Any]) -> int: ...

    async def give_back(self, *, owner: str) -> None: ...

    async def admit(self, *, seconds: float) -> None: ...


class ProxyWorkflow(RolloutWorkflow):
    """Takes closed groups from a service: external agents have opened, rewarded and finalized them.

    One episode is one group: all its finalized sessions, or a single session without a group.

    ``source`` is the app of a rank in this process, a client, or a service's URL (its admin key is
    `ANY_AGENT_SERVER__ADMIN_KEY`). From an app each episode is handed over once and for good, its
    sessions end as trained, and as many groups are admitted as episodes wait. From a client or URL
    it is leased, by the holder ``owner``: who trains on it says so by ``ack``, and admits sessions
    himself, as the trainer's executor does; else it is handed out again.
    ``poll`` is the length of one long poll in seconds.
    """

    def __init__(
        self, source: RLClient | ProxyApp | str, *, owner: str | None = None, poll: float = 30.0
    ) -> None:
        if isinstance(source, str):
            source = RLClient(source, admin_key=os.environ.get(SECRET_VARIABLES[0]))
        if not callable(getattr(source, "lease", None)):
            raise ConfigError(
                f"ProxyWorkflow cannot take episodes from a {type(source).__name__}: give it the "
                "app of proxy_ext.app.create_app, an RLClient, or a service's URL"
            )
        self.owner = owner or f"workflow-{uuid.uuid4().hex[:12]}"
        self._poll = poll
        self._client = source if isinstance(source, RLClient) else None
        self._app = None if isinstance(source, RLClient) else source
        self._returned: deque[Episode] = deque()
        """Handed over to somebody who was gone by then."""

    async def arun_episode(
        self, engine: RolloutEngine | None, data: dict[str, Any] | None
    ) -> Episode:
        """Wait, for as long as it takes, until external agents have closed a group.

        Raises ConfigError for an item of a dataset, and for another engine than the app's.
        """
        if data is not None:
            raise ConfigError(
                "ProxyWorkflow runs on no dataset, its agents bring their own tasks: call "
                "arun_episode(engine, None)"
            )
        if self._client is not None:
            while True:
                packed = await self._client.lease(owner=self.owner, wait=self._poll)
                if packed is not None:
                    return unpack_trajectories(packed)
        assert self._app is not None
        if engine is not None and engine is not self._app.engine:
            raise ConfigError(
                "this engine is not the one that the app samples with: give app.engine, or None"
            )
        return await self._handed_over(self._app)

    async def _handed_over(self, app: ProxyApp) -> Episode:
        """A group whose leases have ended; of whoever is cancelled nothing stays leased."""
        holder = f"{self.owner}-{uuid.uuid4().hex[:12]}"[-64:]
        app.waiting[self.owner] += 1
        packed = None
        try:
            while packed is None and not self._returned:
                await app.admit(seconds=_POLL_HERE)
                packed = await app.lease(owner=holder, wait=min(self._poll, _POLL_HERE))
        except BaseException:
            await asyncio.shield(self._leave(app, holder, []))
            raise
        if packed is None:
            app.waiting[self.owner] -= 1
            return self._returned.popleft()
        episode = unpack_trajectories(packed)
        taken = [trajectory.session_id for trajectory in episode]
        left = asyncio.ensure_future(self._leave(app, holder, taken))
        try:
            await asyncio.shield(left)
        except asyncio.CancelledError:
            # Not by what follows here, which may be cancelled once more.
            left.add_done_callback(partial(self._keep, episode))
            await asyncio.wait([left])
            raise
        return episode

    def _keep(self, episode: Episode, left: asyncio.Future[None]) -> None:
        """Keep for the next one what was handed over to somebody who is gone."""
        if not left.cancelled() and left.exception() is None:
            self._returned.append(episode)

    async def _leave(self, app: ProxyApp, holder: str, taken: list[str]) -> None:
        """End the leases and the wait."""
        app.waiting[self.owner] -= 1
        if taken:
            await app.ack(owner=holder, trained=taken, rejected=[])
        # An app that has ended holds nothing for anybody.
        with suppress(AnyAgentError):
            if not taken:
                await app.give_back(owner=holder)
            await app.admit(seconds=_POLL_HERE)
