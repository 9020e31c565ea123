"""Tells the other parts of the run that this rank serves, and what it is busy with."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from any_agent.presence import Presence
from any_agent.registry import Entry, Load, rank_name
from any_agent.types import SessionMode, SessionState
from proxy_ext.service import Service


def entry_of(service: Service, *, url: str, boot_id: str) -> Entry:
    """The rank as it is now."""
    counts = service.sessions.counts.now
    return Entry(
        name=rank_name(service.rank),
        boot_id=boot_id,
        url=url,
        pid=os.getpid(),
        engine_url=service.engine.url,
        version=service.run.version,
        load=Load(
            open=sum(counts[mode, SessionState.OPEN] for mode in SessionMode),
            waiting=service.sessions.admission.waiting,
            calls=len(service.calls),
        ),
    )


class PresentServer(uvicorn.Server):
    """Present from when it listens until it is told to stop, before it lets its calls end."""

    def __init__(self, config: uvicorn.Config, folder: Path, describe: Callable[[], Entry]) -> None:
        super().__init__(config)
        self._present: Presence | None = None
        self._folder = folder
        self._describe = describe

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._present = Presence(self._folder, self._describe)
            await self._present.begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._present is not None:
            await self._present.end()
        await super().shutdown(sockets=sockets)
