"""The conversation of a session, for graders outside the service."""

from __future__ import annotations

import asyncio

import orjson

from any_agent.errors import Conflict
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore


async def content_of(sessions: SessionStore, session: RecordedSession) -> bytes:
    """Return :class:`any_agent.protocol.rl.SessionContent` as JSON; Conflict where it is not kept.

    Each interaction has only the messages that it adds to its parent: with whole conversations a
    long session would come to many times its size.
    """
    row = session.row
    if row.content != "stored":
        raise Conflict(
            f"the content of session {row.id} is {row.content}, so it cannot be read here; "
            "`any-agent export` reads archived sessions",
            code="content_not_stored",
        )
    if not sessions.config.store_content:
        raise Conflict(
            "this run stores no texts (sessions.store_content), so there is nothing to grade",
            code="content_not_stored",
        )
    await sessions.load(session)
    content = {
        "session_id": row.id,
        "mode": str(row.mode),
        "task_id": row.task_id,
        "metadata": row.metadata,
        "interactions": [
            {
                "id": interaction.id,
                "parent_id": interaction.parent_id,
                "message_delta": interaction.message_delta,
                "output_message": interaction.output_message,
                "finish_reason": interaction.finish_reason,
            }
            for interaction in session.tree
        ],
    }
    return await asyncio.to_thread(orjson.dumps, content)
