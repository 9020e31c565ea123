"""The files of a rank's journal, for those who copy or remove it while no rank uses it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


def journal_files(journal: Path) -> list[Path]:
    """Return all files that a journal may consist of, its log first: without its file it is not
    read."""
    return [Path(f"{journal}{end}") for end in ("-wal", "-shm", "")]


def copy_journal(source: Path, target: Path) -> None:
    """Copy a journal, its log included, to a new file on a local disk; OSError if it fails."""
    try:
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)
    except sqlite3.Error as error:
        raise OSError(f"the journal {source} cannot be copied: {error}") from error
