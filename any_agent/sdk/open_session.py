"""Opening a session: waiting for a slot, and leaving none behind when nobody waits any more."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from contextlib import suppress
from typing import Any

from any_agent.client.backoff import jittered
from any_agent.client.rl_client import RLClient
from any_agent.errors import AnyAgentError, TooManyRequests, Unauthenticated
from any_agent.protocol.rl import RunInfo, SessionStarted
from any_agent.sdk.find_service import ServiceAddress

log = logging.getLogger(__name__)

_WAITS_THERE = 25.0
"""Seconds that one request waits for a slot: less than what stands between cuts connections after.
Always the same, as a request is known again by its body, too."""
_UNDONE_TIMEOUT = 3.0
_SAY_AFTER = 60.0
"""Seconds. To wait for some is usual: training takes as many sessions as it wants."""


class _WaitNotice:
    """Of all sessions that wait, one says why, a minute apart: it is the same for all."""

    def __init__(self) -> None:
        self._next = -math.inf

    def tell(self, waited: float, service: ServiceAddress, error: TooManyRequests) -> None:
        now = time.monotonic()
        if waited >= _SAY_AFTER and now >= self._next:
            self._next = now + _SAY_AFTER
            log.warning(
                "a session has waited %.0f s for a slot at %s: %s",
                waited,
                service.named,
                error.message,
            )


_said = _WaitNotice()


async def run_info(client: RLClient, service: ServiceAddress) -> RunInfo:
    """What a service runs; Unauthenticated says where the key came from that it does not take."""
    try:
        return await client.run_info()
    except Unauthenticated as error:
        raise key_refused(error, service) from None


async def opened(
    client: RLClient,
    service: ServiceAddress,
    fields: dict[str, Any],
    *,
    wait: float,
    idempotency_key: str | None,
) -> SessionStarted:
    """A session, once there is a slot; TooManyRequests after ``wait`` seconds."""
    began = time.monotonic()
    deadline = began + wait
    fields = {**fields, "wait": min(wait, _WAITS_THERE)}
    while True:
        # Such a refusal says that nothing was opened: another key may ask at another rank.
        key = idempotency_key or uuid.uuid4().hex
        try:
            return await client.start_session(idempotency_key=key, **fields)
        except TooManyRequests as error:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise
            _said.tell(time.monotonic() - began, service, error)
            pause = jittered(error.retry_after or 1.0, 0.8, 1.2)
            await asyncio.sleep(min(pause, remaining))
        except Unauthenticated as error:
            raise key_refused(error, service) from None
        except asyncio.CancelledError:
            await _undo(client, fields, key, keep_place=idempotency_key is not None)
            raise


async def _undo(client: RLClient, fields: dict[str, Any], key: str, *, keep_place: bool) -> None:
    """The service may have opened it: then the same request is answered at once.

    Whoever chose the key comes again, and takes the place in the group then.
    """
    with suppress(AnyAgentError, TimeoutError):
        async with asyncio.timeout(_UNDONE_TIMEOUT):
            started = await client.start_session(idempotency_key=key, **fields)
            await client.abort(started, "its opener was cancelled", keep_place=keep_place)


def key_refused(error: Unauthenticated, service: ServiceAddress) -> Unauthenticated:
    """The same, which says where the key came from."""
    if service.api_key is None:
        message = (
            f"{service.url} wants a key: set ANY_AGENT_API_KEY (or OPENAI_API_KEY) to a tenant's "
            "(any-agent keys create --scope tenant), or pass it as api_key= (commands: "
            "--api-key-file)"
        )
    else:
        message = (
            f"{service.url} does not take the key of {service.key_from}: {error.message}; it must "
            "be a tenant's (any-agent keys create --scope tenant)"
        )
    return Unauthenticated(message, code=error.code)
