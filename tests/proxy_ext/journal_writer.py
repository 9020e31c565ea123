"""Commits sessions and interactions without end; prints each id once it is acknowledged.

A test kills it at a random moment.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from any_agent.types import SessionState
from proxy_ext.journal import PutInteraction, PutSession, SetReward, SQLiteJournal
from tests.proxy_ext.journal_lab import make_interaction, make_row


async def main(path: Path, prefix: str) -> None:
    journal = SQLiteJournal(path)

    async def work(worker: int) -> None:
        number = 0
        while True:
            session_id = f"{prefix}-{worker}-{number}"
            interaction = make_interaction(f"i-{session_id}", session_id)
            await journal.commit(
                PutSession(make_row(session_id, state=SessionState.FINALIZED)),
                PutInteraction(interaction),
            )
            value = number + 0.5
            await journal.commit(
                SetReward(session_id, interaction.id, None, value, "test", at=1.0, combined=value)
            )
            print(session_id, number + 0.5, flush=True)
            number += 1

    await asyncio.gather(*(work(k) for k in range(8)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
