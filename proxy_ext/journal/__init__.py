"""The durable record of one rank's sessions.

- What is acknowledged was committed: every write returns after the store's fsync.
- A write is a list of small statements that commit together or not at all, so that any store
  (SQLite here; Redis where ranks move between hosts) can carry it.
- The proxy changes its memory only after the write: a store that fails changes nothing.
"""

from proxy_ext.journal.base import Journal, JournalStats
from proxy_ext.journal.rows import (
    IMPLICITLY,
    AnswerRow,
    NumberedRow,
    RequestMark,
    RewardRow,
    SessionFilter,
    SessionPage,
    SessionRow,
    StoredInteraction,
    StoredRequest,
)
from proxy_ext.journal.sqlite import SQLiteJournal
from proxy_ext.journal.statements import (
    ArchiveContent,
    DropAnswers,
    EraseContent,
    MarkDelivered,
    PutAnswer,
    PutInteraction,
    PutMeta,
    PutSession,
    SetAwaiting,
    SetReward,
    SetState,
    Statement,
)

__all__ = [
    "IMPLICITLY",
    "AnswerRow",
    "ArchiveContent",
    "DropAnswers",
    "EraseContent",
    "Journal",
    "JournalStats",
    "MarkDelivered",
    "NumberedRow",
    "PutAnswer",
    "PutInteraction",
    "PutMeta",
    "PutSession",
    "RequestMark",
    "RewardRow",
    "SQLiteJournal",
    "SessionFilter",
    "SessionPage",
    "SessionRow",
    "SetAwaiting",
    "SetReward",
    "SetState",
    "Statement",
    "StoredInteraction",
    "StoredRequest",
]
