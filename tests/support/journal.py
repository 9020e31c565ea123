"""Rows and interactions for the journal's tests."""

from __future__ import annotations

import sqlite3
from typing import Any

from any_agent.types import (
    GenerationHyperparameters,
    Interaction,
    SessionState,
    id_array,
    logprob_array,
)
from proxy_ext.journal import SessionRow
from tests.support import records


def make_row(session_id: str, **fields: Any) -> SessionRow:
    values: dict[str, Any] = {
        "id": session_id,
        "lane": f"lane-{session_id}",
        "mode": "train",
        "state": SessionState.OPEN,
        "task_id": None,
        "group_id": None,
        "group_size": 1,
        "metadata": {"é": [1, None]},
        "created_at": 1000.0,
        "expires_at": 2000.0,
    }
    return SessionRow(**(values | fields))


def make_interaction(id: str, session_id: str, parent_id: str | None = None) -> Interaction:
    return records.make_interaction(
        id,
        parent_id,
        asked="hé",
        session_id=session_id,
        output_logprobs=logprob_array([-0.5, -0.25]),
        output_versions=id_array([0, 1]),
        output_message={"role": "assistant", "content": "ho"},
        gconfig=GenerationHyperparameters(max_new_tokens=7, stop=("x",)),
        model="m",
        request={"overridden": {}, "recorded": {"user": "me"}},
        created_at=5.0,
    )


class FailingCommit:
    """A connection of which one commit fails, as on a disk that fails."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._fails = True

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and self._fails:
            self._fails = False
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return self._connection.execute(sql, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)
