"""`ProxyWorkflow`: waits for the sessions of external agents, and returns their recordings."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter, deque
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from any_agent.client.rl_client import RLClient
from any_agent.config import ADMIN_KEY_VARIABLE
from any_agent.engine import RolloutEngine
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.record import unpack_trajectories
from any_agent.workflow.base import Episode, RolloutWorkflow

_POLL_HERE = 5.0  # seconds of one poll of an app in this process; slots are recomputed before each


class ProxyApp(Protocol):
    """A rank's app in this process, created by `proxy_ext.app.create_app`."""

    waiting: Counter[str]

    @property
    def engine(self) -> Any: ...

    async def lease(self, *, owner: str, wait: float) -> bytes | None: ...

    async def ack(self, *, owner: str, trained: list[str], rejected: list[Any]) -> int: ...

    async def give_back(self, *, owner: str) -> None: ...

    async def admit(self, *, seconds: float) -> None: ...


class ProxyWorkflow(RolloutWorkflow):
    """Takes groups of sessions that external agents have opened, rewarded and finalized.

    One episode is one closed group: all its finalized sessions, or a single session without a
    group.

    ``source`` is the app of a rank in this process, a client, or a service's URL (with the admin
    key in `ANY_AGENT_SERVER__ADMIN_KEY`). An app delivers each episode once, ends its sessions as
    trained, and admits as many groups as episodes wait. From a client or URL an episode is leased
    by ``owner``: its trainer must send ``ack``, and admit sessions itself, as the trainer's
    executor does; otherwise it is leased again. ``poll`` is the length of one long poll in seconds.
    """

    def __init__(
        self, source: RLClient | ProxyApp | str, *, owner: str | None = None, poll: float = 30.0
    ) -> None:
        if isinstance(source, str):
            # A malformed URL is refused here, not by each episode.
            RLClient(source)
        elif not callable(getattr(source, "lease", None)):
            raise ConfigError(
                f"ProxyWorkflow cannot take episodes from a {type(source).__name__}: give it the "
                "app of proxy_ext.app.create_app, an RLClient, or a service's URL"
            )
        self.owner = owner or f"workflow-{uuid.uuid4().hex[:12]}"
        self._poll = poll
        self._source = source
        self._returned: deque[Episode] = deque()
        """Episodes whose receiver was cancelled while they were delivered."""

    async def arun_episode(
        self, engine: RolloutEngine | None, data: dict[str, Any] | None
    ) -> Episode:
        """Wait, for as long as it takes, until external agents have closed a group.

        Raises ConfigError for an item of a dataset, and for another engine than the app's.
        """
        if data is not None:
            raise ConfigError(
                "ProxyWorkflow takes no item, as its agents have their own tasks: call "
                "arun_episode(engine, None)"
            )
        if isinstance(self._source, str):
            # Nothing would close a client that lived longer than the episode's lease.
            key = os.environ.get(ADMIN_KEY_VARIABLE)
            async with RLClient(self._source, admin_key=key) as client:
                return await self._leased(client)
        if isinstance(self._source, RLClient):
            return await self._leased(self._source)
        if engine is not None and engine is not self._source.engine:
            raise ConfigError(
                "this is not the engine that the app samples with: give app.engine, or None"
            )
        return await self._receive(self._source)

    async def _leased(self, client: RLClient) -> Episode:
        while True:
            packed = await client.lease(owner=self.owner, wait=self._poll)
            if packed is not None:
                return unpack_trajectories(packed)

    async def _receive(self, app: ProxyApp) -> Episode:
        """Return a group whose leases have ended; when cancelled, leave none of its leases."""
        holder = f"{self.owner}-{uuid.uuid4().hex[:12]}"[-64:]
        app.waiting[self.owner] += 1
        packed = None
        try:
            while packed is None and not self._returned:
                await app.admit(seconds=_POLL_HERE)
                packed = await app.lease(owner=holder, wait=min(self._poll, _POLL_HERE))
        except BaseException:
            await asyncio.shield(self._end_wait(app, holder, []))
            raise
        if packed is None:
            app.waiting[self.owner] -= 1
            return self._returned.popleft()
        episode = unpack_trajectories(packed)
        taken = [trajectory.session_id for trajectory in episode]
        ending = asyncio.ensure_future(self._end_wait(app, holder, taken))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            # A callback, because the code after this may be cancelled once more.
            ending.add_done_callback(partial(self._keep, episode))
            await asyncio.wait([ending])
            raise
        return episode

    def _keep(self, episode: Episode, ending: asyncio.Future[None]) -> None:
        """Keep an episode whose receiver was cancelled for the next one."""
        if not ending.cancelled() and ending.exception() is None:
            self._returned.append(episode)

    async def _end_wait(self, app: ProxyApp, holder: str, taken: list[str]) -> None:
        app.waiting[self.owner] -= 1
        if taken:
            await app.ack(owner=holder, trained=taken, rejected=[])
        # An app that has ended has no leases.
        with suppress(AnyAgentError):
            if not taken:
                await app.give_back(owner=holder)
            await app.admit(seconds=_POLL_HERE)
