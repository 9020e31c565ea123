"""What was said in a session, for whoever grades it from outside."""

from __future__ import annotations

import asyncio

import orjson

from any_agent.errors import Conflict
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore


async def content_of(sessions: SessionStore, session: RecordedSession) -> bytes:
    """:class:`any_agent.protocol.rl.SessionContent` as JSON; Conflict where it is not kept.

    Each interaction with what it adds to its parent alone: a long session would come to many times
    its size otherwise.
    """
    row = session.row
    if row.content != "stored":
        raise Conflict(
            f"what was said in session {row.id} is {row.content}: it is there until then, and in "
            "archives for `any-agent export`",
            code="content_not_stored",
        )
    if not sessions.config.store_content:
        raise Conflict(
            "this run keeps no texts (sessions.store_content), so there is nothing to grade",
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
