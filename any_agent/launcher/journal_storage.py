"""The storage of ranks' journals: on a disk of their machine, and between jobs in the run's folder.

SQLite needs locks and shared memory, which network file systems lack. So on several machines each
rank's journal is on its own machine (`server.journal_dir`), and a service that ends normally leaves
a copy in the run's folder, from which the next one continues on any machine. Beside the copy::

    journal/rank-0.json   {"home": the last place of use, "kept": true if the copy is complete}

This note is written before a journal is used. So a journal without a note belongs to an earlier
run, whose folder was removed.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from any_agent.errors import ConfigError, StartupError
from any_agent.rundir.layout import RunDir, read_json, write_json
from any_agent.runtime.atomic_files import copy_durably, create_empty, make_folder

_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|ncpfs|afs|auristorfs|coda|lustre|gpfs|mmfs|beegfs|beegfs_nodev|ceph|"
    r"glusterfs|orangefs|pvfs2|panfs|wekafs|ocfs2|gfs2|daos|9p2000|"
    r"fuse\.(?!fuse-overlayfs|ext|ntfs|bindfs).*"
)
"""Types of file systems in mountinfo that other machines share, or that forward to another one."""
_OCTAL = re.compile(r"\\([0-7]{3})")  # a character of a path in mountinfo, escaped


def require_local(run: RunDir) -> None:
    """Raise ConfigError for journals on a network file system."""
    folder = run.journal(0).parent
    kind = _filesystem_of(folder)
    if kind is not None and _NETWORK.fullmatch(kind):
        raise ConfigError(
            f"the journals would lie in {folder}, on a network file system ({kind}), where "
            "SQLite's locks do not hold: set server.journal_dir to a folder on a disk of this "
            "machine, such as /var/tmp/any-agent-$USER"
        )


def _filesystem_of(path: Path) -> str | None:
    """Return the type of the file system that a path is on, or will be; None if unknown."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    path, found, longest = path.resolve(), None, -1
    for line in text.splitlines():
        # https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html
        fields, _, rest = line.partition(" - ")
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), fields.split()[4]))
        # Later mounts cover earlier ones at the same point.
        if path.is_relative_to(point) and len(point.parts) >= longest:
            longest, found = len(point.parts), rest.split()[0]
    return found


def fetch_journals(
    run: RunDir, ranks: Iterable[int], machine: str, say: Callable[[str], None]
) -> None:
    """Bring the journals of these ranks to this machine, as the last service left them.

    A journal on a lost machine is lost, too: a line reports it, and the rank begins empty.
    """
    if run.journals is None:
        return
    run.make_journals()
    make_folder(run.path / "journal")
    for rank in ranks:
        local, copy, note = run.journal(rank), _copy(run, rank), _note(run, rank)
        noted = read_json(note, {})
        home = f"{machine}:{local}"
        if noted.get("home") == home and local.exists():
            pass  # The journal is here, also after a crash.
        elif noted.get("kept") and copy.exists():
            _remove(local)
            copy_durably(copy, local)
        elif noted:
            _remove(local)
            say(
                f"rank {rank:<4} its sessions are lost: they are at {noted.get('home')}, which did "
                "not end normally"
            )
        elif local.exists():
            say(
                f"rank {rank:<4} a journal of an earlier run of this name was here; it was renamed "
                f"to {_set_aside(local)}"
            )
        write_json(note, {"home": home, "kept": False})
        # From now on the copy is outdated.
        copy.unlink(missing_ok=True)


def note_homes(run: RunDir, ranks: Iterable[int], machine: str) -> None:
    """Note that the journals of these ranks, which have a log in Redis, are on this machine.

    StartupError if one was in use without its log since, and ended on another machine.
    """
    for rank in ranks:
        home, noted = f"{machine}:{run.journal(rank)}", read_json(_note(run, rank), {})
        if noted.get("kept") and noted.get("home") != home:
            raise StartupError(
                f"rank {rank} was served without server.journal since, on {noted.get('home')}: "
                f"start there, or remove {run.log_note(rank)} and the rank's keys in Redis to "
                "begin its log with the journal that it left"
            )
        write_json(_note(run, rank), {"home": home, "kept": False})


def store_journals(
    run: RunDir, ranks: Iterable[int], machine: str, say: Callable[[str], None]
) -> None:
    """Copy these ranks' journals to the run's folder, once no process uses them.

    A line reports a journal that cannot be copied; the others are still copied.
    """
    if run.journals is None:
        return
    for rank in ranks:
        home = f"{machine}:{run.journal(rank)}"
        try:
            _store(run, rank, home)
        except OSError as error:
            say(
                f"rank {rank:<4} its journal was not copied ({error}): its sessions are only at "
                f"{home}"
            )


def _store(run: RunDir, rank: int, home: str) -> None:
    local = run.journal(rank)
    if not local.exists():
        _note(run, rank).unlink(missing_ok=True)
        return
    # The backup includes the write-ahead log. It is made here: SQLite needs a local disk for it.
    backup = local.with_name(f".partial-{local.name}")
    _remove(backup)
    create_empty(backup)
    try:
        with closing(sqlite3.connect(local)) as old, closing(sqlite3.connect(backup)) as new:
            old.backup(new)
        copy_durably(backup, _copy(run, rank))
    except sqlite3.Error as error:
        raise OSError(f"the journal {local} cannot be copied: {error}") from error
    finally:
        _remove(backup)
    write_json(_note(run, rank), {"home": home, "kept": True})


def _copy(run: RunDir, rank: int) -> Path:
    return run.path / "journal" / f"rank-{rank}.kept"


def _note(run: RunDir, rank: int) -> Path:
    return run.path / "journal" / f"rank-{rank}.json"


def _remove(journal: Path) -> None:
    for path in _journal_files(journal):
        path.unlink(missing_ok=True)


def _set_aside(journal: Path) -> Path:
    """Rename a journal to an unused name, and return that."""
    names = (journal.with_name(f"{journal.name}.earlier-{k}") for k in itertools.count(1))
    aside = next(path for path in names if not path.exists())
    for old, new in zip(_journal_files(journal), _journal_files(aside), strict=True):
        if old.exists():
            old.rename(new)
    return aside


def _journal_files(journal: Path) -> list[Path]:
    """Return the files of a journal, its log first: SQLite ignores a log without its file."""
    return [Path(f"{journal}{end}") for end in ("-wal", "-shm", "")]
