"""The durable record of one rank's sessions.

- What is acknowledged was committed: every write returns after the store's fsync.
- A write is a list of small statements that commit together or not at all, so that any store
  (SQLite here; Redis where ranks move between hosts) can carry it.
- The proxy changes its memory only after the write: a store that fails changes nothing.
"""

from proxy_ext.journal.base import (
    Journal,
    JournalStats,
    PutInteraction,
    PutMeta,
    PutSession,
    SessionRow,
    SetFinal,
    SetInteractionReward,
    SetState,
    Statement,
)
from proxy_ext.journal.sqlite import SQLiteJournal

__all__ = [
    "Journal",
    "JournalStats",
    "PutInteraction",
    "PutMeta",
    "PutSession",
    "SQLiteJournal",
    "SessionRow",
    "SetFinal",
    "SetInteractionReward",
    "SetState",
    "Statement",
]
