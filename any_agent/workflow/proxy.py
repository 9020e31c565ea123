"""Episodes of external agents: blocks until they finalize, then takes what was recorded."""

from __future__ import annotations

from typing import Any

from any_agent.client import RLClient
from any_agent.engine import RolloutEngine
from any_agent.record import unpack_trajectories
from any_agent.workflow.base import Episode, RolloutWorkflow


class ProxyWorkflow(RolloutWorkflow):
    """Leases closed groups from a service's ranks.

    One episode is one group: all its finalized sessions, or a single session without a group.
    ``owner`` names the lease's holder; ``poll`` is the length of one long poll in seconds.
    """

    def __init__(self, client: RLClient, *, owner: str, poll: float = 30.0) -> None:
        self._client = client
        self._owner = owner
        self._poll = poll

    async def arun_episode(
        self, engine: RolloutEngine | None, data: dict[str, Any] | None
    ) -> Episode:
        """Wait, for as long as it takes, until external agents have closed a group."""
        while True:
            packed = await self._client.lease(owner=self._owner, wait=self._poll)
            if packed is not None:
                return unpack_trajectories(packed)
