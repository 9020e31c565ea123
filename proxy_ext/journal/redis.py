"""The journal that outlives its machine: a SQLite file, and a log of its commits in Redis.

The file answers every query, as without Redis, but is synced only at a normal end: the log has each
commit. A process that starts elsewhere, or after the file's machine lost power, takes the rank's
lease, and makes the file again from the last snapshot in the run's folder and the log.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import time
import uuid
from contextlib import closing, suppress
from pathlib import Path

from any_agent.errors import AnyAgentError, StartupError
from any_agent.rundir.layout import read_json, write_json
from any_agent.runtime import boot_clock
from any_agent.runtime.atomic_files import copy_durably, make_folder
from any_agent.runtime.redis_client import FAILURES
from proxy_ext.journal import files, schema
from proxy_ext.journal.files import open_file
from proxy_ext.journal.log_keeper import LogKeeper, remove_older, take_snapshot
from proxy_ext.journal.redis_log import Head, Held, RedisLog
from proxy_ext.journal.redis_server import Places, options_of
from proxy_ext.journal.sqlite import RestoredFile, SQLiteJournal
from proxy_ext.journal.statements import place_of, set_place

log = logging.getLogger(__name__)

_CLAIM_INTERVAL = 0.2


def open_logged_journal(url: str) -> SQLiteJournal:
    """Claim the rank, restore its file, and open it; `RunDir.logged_journal_url` makes the URL.

    Raises:
        ConfigError: the server promises less than the configuration asks for.
        StartupError: it cannot be used, another process has the rank, or the file cannot be
            restored; nothing was changed.
    """
    options, places = options_of(url)
    make_folder(places.file.parent)
    journal_log = RedisLog(options, owner=_this_process(), home=f"{_machine()}:{places.file}")
    keeper = LogKeeper(journal_log, places)
    try:
        log.info("journal: %s", journal_log.server.first(journal_log.client))
        head = _claimed(journal_log)
        keeper.renew()
        connection = _restored(journal_log, head, places)
        unsynced = files.begin_unsynced(connection, head.claim)
    except FAILURES as error:
        keeper.close(snapshot=False)
        raise StartupError(f"the log at {journal_log.where} cannot be used: {error}") from error
    except AnyAgentError:
        keeper.close(snapshot=False)
        raise
    keeper.start()
    return SQLiteJournal(places.file, RestoredFile(connection, keeper, head.claim, unsynced))


def _claimed(journal_log: RedisLog) -> Head:
    """Take the lease, once its owner has let it end or is known to be dead."""
    deadline = time.monotonic() + 2 * journal_log.options.lease + 1
    dead = ""
    while True:
        answer = journal_log.claim(dead)
        if isinstance(answer, Head):
            return answer
        dead = answer.owner if _is_dead(answer.owner) else ""
        if not dead:
            if time.monotonic() > deadline:
                raise _held(journal_log, answer)
            time.sleep(_CLAIM_INTERVAL)


def _held(journal_log: RedisLog, held: Held) -> StartupError:
    host, process, *_ = held.owner.split(" ")
    return StartupError(
        f"the rank of {journal_log.where} is carried by process {process} on {host}, "
        "which renews its lease: end that one first, or choose another --trial"
    )


def _restored(journal_log: RedisLog, head: Head, places: Places) -> sqlite3.Connection:
    """Return a connection to a file that has every commit of the log."""
    if not head.run:
        return _begun(journal_log, places)
    if head.schema != schema.VERSION and head.seq > head.base:
        raise StartupError(
            f"the log at {journal_log.where} has commits of version {head.schema} of the tables, "
            f"and this any-agent has version {schema.VERSION}: start the one that wrote them once, "
            "and end it normally"
        )
    connection = _at_home(journal_log, head, places.file)
    if connection is None:
        connection = _from_snapshot(journal_log, head, places)
    try:
        run, seq = place_of(connection)
        journal_log.begin(run, max(seq, head.seq))
        replayed = journal_log.replay(connection, head, seq) if seq < head.seq else 0
        log.info("journal: at commit %d, %d of them from the log", journal_log.seq, replayed)
        ahead = seq > head.seq
        if ahead:
            log.error(
                "the log at %s ends at commit %d, and the file at %d: it begins anew",
                journal_log.where,
                head.seq,
                seq,
            )
        if ahead or head.home != journal_log.home or head.schema != schema.VERSION:
            name, seq = take_snapshot(places)
            (journal_log.seed if ahead else journal_log.trim)(seq, name)
            write_json(places.note, {"home": journal_log.home})
            remove_older(places, name)
    except BaseException:
        connection.close()
        raise
    return connection


def _at_home(journal_log: RedisLog, head: Head, file: Path) -> sqlite3.Connection | None:
    """Return a connection to the file if only this machine has written since it was in use, and
    what it wrote is there."""
    if head.home != journal_log.home or not file.exists():
        return None
    if not files.is_whole(file):
        log.warning("the journal %s was not synced when its machine stopped", file)
        return None
    try:
        connection, damage = open_file(file)
    except StartupError as error:
        log.error("%s", error.message)
        return None
    run, seq = place_of(connection)
    # The file may have been put back from an older copy.
    if damage is None and run == head.run and seq >= head.base:
        return connection
    connection.close()
    log.error("the journal %s is restored from its snapshot and the log", file)
    return None


def _from_snapshot(journal_log: RedisLog, head: Head, places: Places) -> sqlite3.Connection:
    source = places.snapshots / head.snapshot
    if not source.exists():
        raise StartupError(
            f"the snapshot {source} is not there: with server.journal the run's folder must be one "
            "that all machines share. If the run was removed, choose another --trial, or delete "
            f"the run's keys in Redis, too: {' '.join(journal_log.keys)}"
        )
    _clear(places.file, head)
    copy_durably(source, places.file)
    connection, damage = open_file(places.file)
    if damage is not None or place_of(connection)[0] != head.run:
        connection.close()
        raise StartupError(
            f"the snapshot {source} is damaged, or of another run: restore it from a backup"
        )
    return connection


def _clear(file: Path, head: Head) -> None:
    """Remove an older file of the run. What is another's, newer or unreadable, is renamed."""
    ours = file.exists() and _is_older(file, head)
    if file.exists() and not ours:
        log.error("the journal %s is kept as %s.outdated, and made again", file, file)
    for end in ("-wal", "-shm", ""):
        old = Path(f"{file}{end}")
        if old.exists() and ours:
            old.unlink()
        elif old.exists():
            old.replace(Path(f"{file}.outdated{end}"))


def _is_older(file: Path, head: Head) -> bool:
    try:
        with closing(sqlite3.connect(file)) as connection:
            run, seq = place_of(connection)
    except (sqlite3.Error, KeyError, TypeError, ValueError):
        return False  # a loss of power may leave anything in it
    return run == head.run and seq <= head.seq


def _begun(journal_log: RedisLog, places: Places) -> sqlite3.Connection:
    """Begin a log with the file that is there, or a new one."""
    file, note = places.file, places.note
    home = read_json(note, {}).get("home")
    if home is not None and (home != journal_log.home or not file.exists()):
        raise StartupError(
            f"the log at {journal_log.where} is gone, and the journal's last home was {home}: "
            f"start there, restore the server from its backup, or remove {note} to begin anew"
        )
    if home is not None and not files.is_whole(file):
        raise StartupError(
            f"the log at {journal_log.where} is gone, and the journal {file} was not synced when "
            f"its machine stopped: restore the server from its backup, or remove {note} to begin "
            "with what the file has"
        )
    connection, _ = open_file(file)
    try:
        journal_log.begin(uuid.uuid4().hex, place_of(connection)[1])
        connection.execute("BEGIN IMMEDIATE")
        set_place(connection, journal_log.run, journal_log.seq)
        connection.execute("COMMIT")
        name, seq = take_snapshot(places)
        journal_log.seed(seq, name)
        write_json(note, {"home": journal_log.home})
        remove_older(places, name)
    except BaseException:
        connection.close()
        raise
    return connection


def _machine() -> str:
    """Return a name of this machine; those of two containers differ, too."""
    with suppress(OSError):
        return f"{socket.gethostname()}/{Path('/etc/machine-id').read_text().strip()}"
    return socket.gethostname()


def _this_process() -> str:
    """Return `HOST PID START BOOT ID`: by the first four a process here sees if it has ended."""
    pid = os.getpid()
    return f"{socket.gethostname()} {pid} {_started(pid)} {_boot()} {uuid.uuid4().hex}"


def _is_dead(owner: str) -> bool:
    """Return whether the owner was a process of this boot of this machine that has ended."""
    _, pid, started, boot, _ = owner.split(" ")
    return boot == _boot() and _started(int(pid)) != started


def _started(pid: int) -> str:
    """Return the clock ticks from the boot to a process's start; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def _boot() -> str:
    # Processes of two containers share a boot, but not their numbers. Without an id every boot is
    # another one, so that no owner is taken for dead.
    space = os.readlink("/proc/self/ns/pid")
    return (boot_clock.boot_id() or uuid.uuid4().hex) + space
