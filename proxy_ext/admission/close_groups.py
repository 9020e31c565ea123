"""The deadlines of groups: each is handed out, or rejected with too few finalized sessions."""

from __future__ import annotations

import asyncio
import logging
import time

from any_agent.errors import AnyAgentError
from any_agent.types import SessionState
from proxy_ext.sessions.expiry import SessionExpirer
from proxy_ext.sessions.groups import Group
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.sessions.state_machine import Event

log = logging.getLogger(__name__)

TOO_SMALL = "group_too_small"
"""The reason of sessions rejected because their group had too few of them."""


async def close_groups(sessions: SessionStore, expiry: SessionExpirer) -> None:
    """Close the groups whose time is over, and reject the sessions of those that are too small.

    After a failure of the store the next call tries again.
    """
    now = time.monotonic()
    for group in sessions.groups.all():
        try:
            if group.started and group.deadline <= now:
                await _close(sessions, expiry, group)
            if group.too_small:
                await _reject(sessions, group)
        except AnyAgentError as error:
            log.warning("could not close group %s yet: %s", group.id, error.message)


async def _close(sessions: SessionStore, expiry: SessionExpirer, group: Group) -> None:
    """Let no member join any more, and expire the open ones.

    A member that awaits its reward has its own deadline, and the group waits for it.
    """
    if not group.expired:
        free = group.room
        group.expired = True
        # Released after the group is closed, so that no open admitted by this can join it.
        sessions.admission.release(free)
        await sessions.group_changed(group)
    open_ids = [id for id, state in group.members.items() if state is SessionState.OPEN]
    found = (sessions.live.get(id) for id in open_ids)
    await asyncio.gather(
        *(expiry.end(member, "its group's time ran out") for member in found if member is not None)
    )


async def _reject(sessions: SessionStore, group: Group) -> None:
    members = [sessions.live[id] for id in group.finalized]
    size = len(members)
    reasons = dict.fromkeys((session.id for session in members), TOO_SMALL)
    await sessions.move(members, Event.DISCARD, reasons=reasons)
    sessions.groups.too_small += 1
    log.warning(
        "group %s closed with %d finalized of %d sessions, and needs %d: rejected as %s",
        group.id,
        size,
        group.size,
        group.min_size,
        TOO_SMALL,
    )
