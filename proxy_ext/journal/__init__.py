"""The durable record of one rank's sessions.

- What is acknowledged was committed: every write returns after the store's fsync.
- A write is a list of small statements that commit together or not at all, so that any store
  (SQLite here; Redis where ranks move between hosts) can carry it.
- The proxy changes its memory only after the write: a store that fails changes nothing.
"""

from proxy_ext.journal.base import Journal, JournalStats
from proxy_ext.journal.rows import (
    AnswerRow,
    RequestMark,
    RewardRow,
    SessionRow,
    StoredInteraction,
    StoredRequest,
)
from proxy_ext.journal.sqlite import SQLiteJournal
from proxy_ext.journal.statements import (
    DropAnswers,
    EraseContent,
    MarkDelivered,
    PutAnswer,
    PutInteraction,
    PutMeta,
    PutSession,
    SetAwaiting,
    SetFinal,
    SetReward,
    SetState,
    Statement,
)

__all__ = [
    "AnswerRow",
    "DropAnswers",
    "EraseContent",
    "Journal",
    "JournalStats",
    "MarkDelivered",
    "PutAnswer",
    "PutInteraction",
    "PutMeta",
    "PutSession",
    "RequestMark",
    "RewardRow",
    "SQLiteJournal",
    "SessionRow",
    "SetAwaiting",
    "SetFinal",
    "SetReward",
    "SetState",
    "Statement",
    "StoredInteraction",
    "StoredRequest",
]
