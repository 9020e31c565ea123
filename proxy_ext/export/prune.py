"""The program that `any-agent sessions prune` starts: it removes the content of settled sessions.

The service's lock is held meanwhile. A session's row says that its content is deleted before the
content leaves an archive. So what a kill interrupts is done by the same command.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from any_agent.auth.access import run_dir_of, signer_of
from any_agent.cli.prune import SETTLED, add_prune_arguments
from any_agent.config import Config, load_config
from any_agent.errors import ConfigError, StartupError
from any_agent.protocol.idempotency import ANSWER_TTL
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import append_line, fsync, make_folder
from any_agent.runtime.command_line import CommandParser, columns, guarded, overrides_of, parse
from any_agent.types import SessionState
from proxy_ext.archive.archiver import archived_of
from proxy_ext.archive.files import ArchiveFile, list_archives, read_lines, remove_from
from proxy_ext.archive.records import read_record
from proxy_ext.export.reader import ranks_of
from proxy_ext.idempotency import IdempotencyStore
from proxy_ext.journal import EraseContent, Journal, open_journal
from proxy_ext.journal.base import DropAnswers
from proxy_ext.journal.reader import JournalReader

_BATCH = 256  # sessions that are erased at once
_ALL = 2**31 - 1
_UNSETTLED = tuple(state for state in SessionState if state not in SETTLED)


@dataclass(slots=True)
class Found:
    """Sessions and bytes that go, by state."""

    sessions: Counter[str] = field(default_factory=Counter)
    journal: Counter[str] = field(default_factory=Counter)
    """Bytes of content in the journals."""
    archives: Counter[str] = field(default_factory=Counter)
    """Bytes in the archives."""
    needed: int = 0
    """Sessions that stay because a resume of the training needs them."""
    unsettled: int = 0
    """Sessions that stay because they are not settled."""
    freed: int = 0
    """Bytes by which journals and archives have become smaller."""


class Pruner:
    """Finds, and removes, settled sessions of one trial."""

    def __init__(self, run: RunDir, *, before: float, states: Iterable[str], apply: bool) -> None:
        self._run = run
        self._before = before
        self._states = frozenset(states)
        self._apply = apply
        self.found = Found()

    async def rank(self, rank: int) -> None:
        """Go through the journal, if this machine has it, and the archives of a rank."""
        path, before = self._run.journal(rank), self._size(rank)
        journal = open_journal(self._run.journal_url(rank)) if path.exists() else None
        try:
            if journal is not None:
                with closing(JournalReader(path)) as reader:
                    await self._journal(journal, reader)
            for file in list_archives(self._run.archive, rank):
                await self._archive(file, journal)
            if journal is not None and self._apply:
                answers = IdempotencyStore(journal, signer_of(self._run))
                await answers.recover()
                await journal.commit(DropAnswers(answers.now - ANSWER_TTL))
                while await journal.trim():
                    pass
        finally:
            if journal is not None:
                await journal.close()
        self.found.freed += before - self._size(rank)

    async def _journal(self, journal: Journal, reader: JournalReader) -> None:
        run = await journal.meta("run") or {}
        settled = await journal.ended(
            before=self._before, oldest_step=run.get("oldest_step"), limit=_ALL
        )
        taken = await journal.ended(before=self._before, oldest_step=_ALL, limit=_ALL)
        self.found.needed += self._wanted(each.row.state for each in taken)
        self.found.needed -= self._wanted(each.row.state for each in settled)
        self.found.unsettled += len(await journal.sessions(_UNSETTLED))
        for state in self._states:
            ids = [each.row.id for each in settled if each.row.state == state]
            self.found.sessions[state] += len(ids)
            for at in range(0, len(ids), _BATCH):
                batch = tuple(ids[at : at + _BATCH])
                self.found.journal[state] += reader.content_bytes(batch)
                if self._apply:
                    await journal.commit(EraseContent(batch))

    def _wanted(self, states: Iterable[SessionState]) -> int:
        return sum(state in self._states for state in states)

    async def _archive(self, file: ArchiveFile, journal: Journal | None) -> None:
        # Each line is compressed by itself, so its share of the file is about that of its length.
        lines, chosen, total = Counter[str](), list[str](), 0
        for line in read_lines(file.path, _tell):
            total += len(line)
            session = _session_of(line)
            if session is None or session["state"] not in self._states:
                continue
            if (session["ended_at"] or session["created_at"]) < self._before:
                chosen.append(session["id"])
                lines[session["state"]] += len(line)
                self.found.sessions[session["state"]] += 1
        size = file.path.stat().st_size
        for state, length in lines.items():
            self.found.archives[state] += round(size * length / total)
        if self._apply and chosen:
            if journal is not None:
                gone = await archived_of(journal, chosen)
                await journal.commit(EraseContent(tuple(gone)))
            remove_from(file, frozenset(chosen), _tell)

    def _size(self, rank: int) -> int:
        journal = self._run.journal(rank)
        files = [file.path for file in list_archives(self._run.archive, rank)]
        files += [journal, journal.with_name(f"{journal.name}-wal")]
        return sum(path.stat().st_size for path in files if path.exists())


def _session_of(line: bytes) -> Mapping[str, Any] | None:
    try:
        return read_record(line).session
    except ValueError:
        # The line that describes the file, or one that cannot be read, which stays.
        return None


def _tell(problem: str) -> None:
    print(f"warning: {problem}", file=sys.stderr)


def prune(arguments: argparse.Namespace) -> int:
    """Do what the arguments ask for, and print it. Raises AnyAgentError."""
    run = _trial(load_config(arguments.config, overrides_of(arguments)))
    ranks = ranks_of(run)
    if logged := [rank for rank in ranks if run.log_note(rank).exists()]:
        raise ConfigError(
            f"the journal of rank {logged[0]} has a log in Redis (server.journal), which would "
            "bring back what is removed: a service of this trial keeps to sessions.keep_hours and "
            "sessions.archive_bytes by itself"
        )
    if run.in_use():
        raise StartupError(
            f"a service is using {run.path}: stop it first; while it runs it keeps to "
            "sessions.keep_hours and sessions.archive_bytes by itself, and single sessions go by "
            "any-agent sessions delete"
        )
    before = time.time() - arguments.older_than
    states = arguments.state or SETTLED
    pruner = Pruner(run, before=before, states=states, apply=arguments.apply)
    with run.lock():
        if arguments.apply:
            _audit(run, older_than=arguments.older_than, states=sorted(states))
        for rank in ranks:
            asyncio.run(pruner.rank(rank))
    _print(pruner.found, run, arguments)
    return 0


def _trial(config: Config) -> RunDir:
    """Return a trial, whose journals lie where its last start kept them.

    Raises NotFound, which lists the existing trials.
    """
    run = run_dir_of(config)
    run.check_format()
    if not run.resolved.is_file():
        raise run.no_trial("name one that was started, with root=, user=, --experiment and --trial")
    if run.journals is None:
        last = load_config(run.resolved, environ={})
        run = run_dir_of(config.model_copy(update={"server": last.server}))
    return run


def _audit(run: RunDir, **fields: Any) -> None:
    """Write a line of the audit log, on disk before anything is removed."""
    make_folder(run.audit)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = {"at": at, "event": "sessions prune", "who": getpass.getuser(), **fields}
    path = run.audit / "prune.jsonl"
    append_line(path, json.dumps(line))
    fsync(path)


def _print(found: Found, run: RunDir, arguments: argparse.Namespace) -> None:
    if arguments.json:
        by_state = {
            state: {
                "sessions": number,
                "journal_bytes": found.journal[state],
                "archive_bytes": found.archives[state],
            }
            for state, number in sorted(found.sessions.items())
        }
        kept = {"needed": found.needed, "unsettled": found.unsettled}
        freed = found.freed if arguments.apply else None
        print(json.dumps({"states": by_state, **kept, "freed_bytes": freed}))
        return
    rows: list[tuple[str, ...]] = [("STATE", "SESSIONS", "IN JOURNALS", "IN ARCHIVES")]
    rows += [
        (state, str(number), _size(found.journal[state]), _size(found.archives[state]))
        for state, number in sorted(found.sessions.items())
        if number
    ]
    total = (found.sessions.total(), found.journal.total(), found.archives.total())
    rows.append(("all", str(total[0]), *map(_size, total[1:])))
    print("\n".join(columns(rows)))
    if found.needed:
        print(f"kept      {found.needed} that a resume from the oldest checkpoint needs")
    if found.unsettled:
        print(f"kept      {found.unsettled} that are not settled")
    if arguments.apply:
        print(f"removed   {run.path} is {_size(found.freed)} smaller")
    else:
        print("dry run   nothing was removed; --apply removes them for good")


def _size(number: int) -> str:
    return f"{number / 1e6:.1f} MB" if number >= 50_000 else f"{number} B"


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="any-agent sessions prune")
    add_prune_arguments(parser)
    arguments = parse(parser, argv)
    return guarded(lambda: prune(arguments))


if __name__ == "__main__":
    sys.exit(main())
