"""The usage of a run, as its folder has it: whatever is killed, each number is there once.

==================================  =============================================================
prompt and sampled tokens, calls    the table `usage` of each rank's journal, which a call's commit
                                    adds to, so that a call is recorded and counted, or neither
sessions                            the rows of each rank's journal, which stay when content goes
steps, trained tokens               `metrics.jsonl`: of a step that was made again the last line
==================================  =============================================================

Days are those of UTC.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from any_agent.rundir.layout import JOURNAL_SUFFIX, RunDir, numbered
from any_agent.runtime.log_tail import LogTail

log = logging.getLogger(__name__)

TABLE = """
CREATE TABLE usage (
    day TEXT PRIMARY KEY, prompt_tokens INTEGER NOT NULL, sampled_tokens INTEGER NOT NULL,
    calls INTEGER NOT NULL
) STRICT;
"""
"""The table in a journal."""
ADD = """
INSERT INTO usage (day, prompt_tokens, sampled_tokens, calls) VALUES (?, ?, ?, ?)
ON CONFLICT (day) DO UPDATE SET
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    sampled_tokens = sampled_tokens + excluded.sampled_tokens, calls = calls + excluded.calls
"""
_CALLS = "SELECT day, prompt_tokens, sampled_tokens, calls FROM usage"
_SESSIONS = (
    "SELECT date(created_at, 'unixepoch'), COUNT(*), MAX(rowid) FROM sessions "
    "WHERE rowid > ? GROUP BY 1"
)
TRAINER = "trainer"
_OF_A_STEP = ("step", "time", "tokens")
_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_CANTOPEN,
}
"""Errors after which a read may be tried again; after others the file is damaged."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of one day, or of any sum of them."""

    prompt_tokens: int = 0
    """Tokens of the calls' prompts, once for all choices of a call."""
    sampled_tokens: int = 0
    calls: int = 0
    sessions: int = 0
    """Sessions that were opened."""
    trained_tokens: int = 0
    """Sampled tokens that steps have trained on, in each epoch of a batch."""
    steps: int = 0

    def __add__(self, other: Usage) -> Usage:
        mine, others = asdict(self), asdict(other)
        return Usage(**{name: mine[name] + others[name] for name in mine})


Days: TypeAlias = dict[str, Usage]
"""The usage by day, `2026-11-30`."""


def day_of(at: float) -> str:
    """Return the day of a time in seconds since 1970."""
    return time.strftime("%Y-%m-%d", time.gmtime(at))


class UsageReader:
    """The usage of one run. What was read once is not read again, however often one looks."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._journals: dict[int, _JournalReader] = {}
        self._lines = LogTail(run.metrics, from_start=True)
        self._steps: dict[int, dict[str, Any]] = {}
        """The last line of each step."""

    def read(self, *, last: bool = False) -> dict[str, Days]:
        """Return the usage by the part that has counted it: `rank-0`, ..., `trainer`.

        A part whose file is not there, or cannot be read, is left out. ``last``: it cannot be read
        later, so sqlite3.Error is raised where another try may succeed.
        """
        found: dict[str, Days] = {}
        paths = numbered(self._run.journal(0).parent, rf"rank-(\d+){JOURNAL_SUFFIX}")
        for rank, path in paths.items():
            journal = self._journals.setdefault(rank, _JournalReader(path))
            try:
                found[f"rank-{rank}"] = journal.read()
            except sqlite3.Error as error:
                if last and getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
                    raise
                log.log(
                    logging.ERROR if last else logging.WARNING,
                    *("the usage in %s cannot be read: %s", path, error),
                )
        if steps := self._trained():
            found[TRAINER] = steps
        return found

    def _trained(self) -> Days:
        for line in self._lines.new_records():
            if isinstance(line, dict) and "eval" not in line and _counts(line):
                self._steps[line["step"]] = {name: line[name] for name in _OF_A_STEP}
        days: defaultdict[str, Usage] = defaultdict(Usage)
        for line in self._steps.values():
            days[day_of(line["time"])] += Usage(trained_tokens=int(line["tokens"]), steps=1)
        return dict(days)


def _counts(line: dict[str, Any]) -> bool:
    """Return whether a line has the numbers of a step."""
    numbers = [line.get(name) for name in _OF_A_STEP]
    return all(type(n) in (int, float) and 0 <= n < 1e12 for n in numbers)  # type: ignore[operator]


class _JournalReader:
    """The usage that a rank's journal has. Rows of sessions stay, in the order of their opens."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sessions: Counter[str] = Counter()
        self._row = 0
        """The last row that was counted."""

    def read(self) -> Days:
        """Return the usage by day; sqlite3.Error if it cannot be read."""
        uri = f"{self._path.absolute().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)) as journal:
            # Both of one moment.
            journal.execute("BEGIN")
            calls = journal.execute(_CALLS).fetchall()
            opened = journal.execute(_SESSIONS, (self._row,)).fetchall()
        for day, sessions, row in opened:
            self._sessions[day] += sessions
            self._row = max(self._row, row)
        days: defaultdict[str, Usage] = defaultdict(Usage)
        for day, *numbers in calls:
            days[day] = Usage(*numbers)
        for day, sessions in self._sessions.items():
            days[day] += Usage(sessions=sessions)
        return dict(days)
