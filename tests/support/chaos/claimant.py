"""A process that carries a rank whenever it can, and writes session after session.

Prints `begun` for each life of its journal, `NUMBER SESSION` for each acknowledged commit, and
`refused SESSION` for the others. Run it by ``python -m``, with a folder, a URL, a name and a lease.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from any_agent.errors import StartupError, StoreUnavailable
from proxy_ext.journal import SQLiteJournal
from tests.support.redis_journal import Machine, be_machine, put


async def main(folder: Path, url: str, name: str, lease: float) -> None:
    be_machine(name)
    machine = Machine(folder, url, name)
    number = 0
    while True:
        try:
            journal = await asyncio.to_thread(machine.open, lease=lease)
        except StartupError:
            continue  # the other one has the rank
        print("begun", flush=True)
        number = await write(journal, name, number)
        await journal.close()


async def write(journal: SQLiteJournal, name: str, number: int) -> int:
    """Write until another process has the rank; return the number of the last session."""
    log: Any = journal.keeper.log  # type: ignore[union-attr]
    while journal.stats.lost is None:
        number += 1
        session_id = f"{name}-{number}"
        try:
            await put(journal, session_id)
        except StoreUnavailable:
            print("refused", session_id, flush=True)
        else:
            # Nobody else writes here: it is the number of this commit.
            print(log.seq, session_id, flush=True)
    return number


if __name__ == "__main__":
    folder, url, name, lease = sys.argv[1:]
    asyncio.run(main(Path(folder), url, name, float(lease)))
