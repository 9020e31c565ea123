"""Opening a session: wait for a slot, and leave no session behind when the caller is cancelled."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from contextlib import suppress
from typing import Any

from any_agent.client.backoff import wait_for_slot
from any_agent.client.rl_client import RLClient
from any_agent.errors import AnyAgentError, TooManyRequests, Unauthenticated
from any_agent.protocol.rl import RunInfo, SessionStarted
from any_agent.sdk.find_service import ServiceAddress

log = logging.getLogger(__name__)

_WAITS_THERE = 25.0
"""Seconds that one request waits at the service: proxies in between cut connections after longer
ones. Always the same, as an idempotent request is also recognised by its body."""
_UNDONE_TIMEOUT = 3.0
_SAY_AFTER = 60.0
"""Seconds without a log line. Short waits are usual: training opens as many sessions as it
wants."""


class _WaitNotice:
    """Logs why sessions wait, once a minute for all of them: the reason is the same for all."""

    def __init__(self) -> None:
        self._next = -math.inf

    def log(self, waited: float, service: ServiceAddress, error: TooManyRequests) -> None:
        now = time.monotonic()
        if waited >= _SAY_AFTER and now >= self._next:
            self._next = now + _SAY_AFTER
            log.warning(
                "a session has waited %.0f s for a slot at %s: %s",
                waited,
                service.named,
                error.message,
            )


_notice = _WaitNotice()


async def run_info(client: RLClient, service: ServiceAddress) -> RunInfo:
    """Return the service's run; Unauthenticated names the source of a key that it refuses."""
    try:
        return await client.run_info()
    except Unauthenticated as error:
        raise key_refused(error, service) from None


async def open_session(
    client: RLClient,
    service: ServiceAddress,
    fields: dict[str, Any],
    *,
    wait: float,
    idempotency_key: str | None,
) -> SessionStarted:
    """Open a session as soon as there is a slot; TooManyRequests after ``wait`` seconds."""
    fields = {**fields, "wait": min(wait, _WAITS_THERE)}

    async def attempt() -> SessionStarted:
        # A refusal means that nothing was opened: with another key another rank may be asked.
        key = idempotency_key or uuid.uuid4().hex
        try:
            return await client.start_session(idempotency_key=key, **fields)
        except Unauthenticated as error:
            raise key_refused(error, service) from None
        except asyncio.CancelledError:
            await _undo(client, fields, key, keep_place=idempotency_key is not None)
            raise

    async def log_wait(error: TooManyRequests, waited: float) -> None:
        _notice.log(waited, service, error)

    return await wait_for_slot(attempt, patience=wait, refused=log_wait)


async def _undo(client: RLClient, fields: dict[str, Any], key: str, *, keep_place: bool) -> None:
    """Abort the session that the service may have opened: the same request returns it at once.

    A caller that chose the key opens again, and takes the place in the group then.
    """
    with suppress(AnyAgentError, TimeoutError):
        async with asyncio.timeout(_UNDONE_TIMEOUT):
            started = await client.start_session(idempotency_key=key, **fields)
            await client.abort(started, "its opener was cancelled", keep_place=keep_place)


def key_refused(error: Unauthenticated, service: ServiceAddress) -> Unauthenticated:
    """Return the error with the source of the key in its message."""
    if service.api_key is None:
        message = (
            f"{service.url} requires a key: set ANY_AGENT_API_KEY (or OPENAI_API_KEY) to a "
            f"tenant's "
            "(any-agent keys create --scope tenant), or pass it as api_key= (commands: "
            "--api-key-file)"
        )
    else:
        message = (
            f"{service.url} refuses the key of {service.key_from}: {error.message}; it must "
            "be a tenant's (any-agent keys create --scope tenant)"
        )
    return Unauthenticated(message, code=error.code)
