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

import json
import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from any_agent.rundir.layout import JOURNAL_SUFFIX, RunDir, numbered

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
_SESSIONS = "SELECT date(created_at, 'unixepoch'), COUNT(*) FROM sessions GROUP BY 1"
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


def read_usage(run: RunDir, *, last: bool = False) -> dict[str, Days]:
    """Return the usage by the part that has counted it: `rank-0`, ..., `trainer`.

    A part whose file is not there, or cannot be read, is left out. ``last``: it cannot be read
    later, so sqlite3.Error is raised where another try may succeed.
    """
    found: dict[str, Days] = {}
    ranks = numbered(run.journal(0).parent, rf"rank-(\d+){JOURNAL_SUFFIX}")
    for rank, path in ranks.items():
        try:
            found[f"rank-{rank}"] = _of_journal(path)
        except sqlite3.Error as error:
            if last and getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
                raise
            log.log(
                logging.ERROR if last else logging.WARNING,
                *("the usage in %s cannot be read: %s", path, error),
            )
    if steps := _of_steps(run.metrics):
        found[TRAINER] = steps
    return found


def _of_journal(path: Path) -> Days:
    days: defaultdict[str, Usage] = defaultdict(Usage)
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)) as journal:
        # Both of one moment.
        journal.execute("BEGIN")
        for day, prompt, sampled, calls in journal.execute(_CALLS):
            days[day] += Usage(prompt, sampled, calls)
        for day, sessions in journal.execute(_SESSIONS):
            days[day] += Usage(sessions=sessions)
    return dict(days)


def _of_steps(path: Path) -> Days:
    days: defaultdict[str, Usage] = defaultdict(Usage)
    last = {line["step"]: line for line in _steps(path)}
    for line in last.values():
        days[day_of(line["time"])] += Usage(trained_tokens=int(line["tokens"]), steps=1)
    return dict(days)


def _steps(path: Path) -> Iterator[dict[str, Any]]:
    # A run that is removed meanwhile has no file.
    with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            # A line may be incomplete: of a trainer that was killed, and of a step that is made
            # again.
            with suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict) and "eval" not in line and _counts(line):
                    yield line


def _counts(line: dict[str, Any]) -> bool:
    """Return whether a line has the numbers of a step."""
    numbers = [line.get(name) for name in _OF_A_STEP]
    return all(type(n) in (int, float) and 0 <= n < 1e12 for n in numbers)  # type: ignore[operator]
