"""The durable record of one rank's sessions.

- Acknowledged writes are committed: every write returns after the store's fsync.
- A write is a list of small statements that commit together or not at all, so that any store can
  carry it: SQLite here, with a log in Redis where a rank must outlive its machine, others by
  :func:`register_journal`.
- The proxy changes its memory only after the write: a store that fails changes nothing.
"""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from any_agent.rundir.layout import LOGGED_SCHEME
from proxy_ext.journal.base import (
    EXPORT_OWNER,
    AnswerRow,
    ArchiveContent,
    DropAnswers,
    EraseContent,
    Journal,
    JournalStats,
    MarkDelivered,
    NumberedRow,
    PutAnswer,
    PutInteraction,
    PutMeta,
    PutSession,
    RequestMark,
    RewardRow,
    SessionFilter,
    SessionPage,
    SessionRow,
    SetAwaiting,
    SetReward,
    SetState,
    Statement,
    StoredInteraction,
    StoredRequest,
    open_journal,
    register_journal,
)
from proxy_ext.journal.sqlite import SQLiteJournal


def _open_logged(url: str) -> Journal:
    # Only a rank that has its log there needs the package.
    from proxy_ext.journal.redis import open_logged_journal

    return open_logged_journal(url)


register_journal("sqlite", lambda url: SQLiteJournal(Path(unquote(urlsplit(url).path))))
register_journal(LOGGED_SCHEME, _open_logged)

__all__ = [
    "EXPORT_OWNER",
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
    "open_journal",
    "register_journal",
]
