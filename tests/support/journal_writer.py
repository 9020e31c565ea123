"""Leads sessions through their lives without end; prints each step once it is acknowledged.

A test kills it at a random moment.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from any_agent.types import SessionState
from proxy_ext.journal import (
    EraseContent,
    MarkDelivered,
    PutAnswer,
    PutInteraction,
    PutSession,
    RequestMark,
    SetReward,
    SetState,
    SQLiteJournal,
    Statement,
)
from tests.support.journal import make_interaction, make_row

STEPS = ("recorded", "rewarded", "finalized", "erased")


def statements(session_id: str, value: float) -> list[tuple[Statement, ...]]:
    """What is written at once in each step."""
    interaction = make_interaction(f"i-{session_id}", session_id)
    mark = RequestMark(session_id.encode(), 0)
    reward = SetReward(session_id, interaction.id, None, value, "test", at=1.0, combined=value)
    return [
        (PutSession(make_row(session_id)), PutInteraction(interaction, b"key", mark)),
        (reward, MarkDelivered((interaction.id,))),
        (
            SetReward(session_id, None, None, value, "test", at=1.0, combined=value),
            SetState((session_id,), SessionState.FINALIZED),
            PutAnswer("session", session_id, b"hash", 200, b"{}", 1.0),
        ),
        (SetState((session_id,), SessionState.REJECTED, "deleted"), EraseContent((session_id,))),
    ]


async def main(path: Path, prefix: str) -> None:
    journal = SQLiteJournal(path)

    async def work(worker: int) -> None:
        number = 0
        while True:
            session_id, value = f"{prefix}-{worker}-{number}", number + 0.5
            steps = statements(session_id, value)
            for step, written in zip(STEPS[: 4 - number % 2], steps, strict=False):
                await journal.commit(*written)
                print(session_id, step, value, flush=True)
            number += 1

    await asyncio.gather(*(work(k) for k in range(8)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
