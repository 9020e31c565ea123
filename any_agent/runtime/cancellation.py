"""The end of an agent's run that nobody waits for any more."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)

_CANCEL_TIMEOUT = 5.0
"""Seconds for a cancelled run to end in."""


async def cancel_and_wait(run: asyncio.Future[Any], name: str) -> None:
    """End a run of this agent if it has not ended; one that will not be ended holds up nobody."""
    if run.done():
        return
    run.cancel()
    await asyncio.wait([run], timeout=_CANCEL_TIMEOUT)
    if run.done():
        # What it says now concerns nobody.
        _ = run.cancelled() or run.exception()
    else:
        log.warning("a run of %s goes on after it was cancelled; it is left alone", name)
