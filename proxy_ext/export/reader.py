"""The sessions of one rank, read from its journal and its archives, and their export as rows.

A running service does not wait for the reader, which finds what is archived meanwhile.
"""

from __future__ import annotations

import argparse
import heapq
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from any_agent.auth.access import run_dir_of
from any_agent.config import Config, load_config
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.record import (
    InteractionTree,
    discarded,
    export_rows,
    is_frozen,
    propagate_rewards,
)
from any_agent.rundir.layout import JOURNAL_SUFFIX, RunDir
from any_agent.runtime.command_line import overrides_of
from proxy_ext.archive.files import ArchiveFile, ArchiveFolder, Report, first_session, list_archives
from proxy_ext.archive.records import ArchiveRecord, read_record, record_line
from proxy_ext.journal.reader import DamagedSession, ExportFilter, JournalReader

_PROGRESS_INTERVAL = 2.0
_RANK = re.compile(rf"rank-(\d+)({re.escape(JOURNAL_SUFFIX)}|-.*\.jsonl\.gz)")


class SessionRecord(NamedTuple):
    """One session as a line of JSON."""

    created_at: float
    session_id: str
    line: bytes
    """The session as in :mod:`proxy_ext.archive.records`."""
    archived: bool


class RunSessions:
    """The sessions of a run's ranks, as far as somebody wants them."""

    def __init__(
        self, run_dir: RunDir, ranks: list[int], wanted: ExportFilter, settings: Config
    ) -> None:
        self.dir = run_dir
        self.settings = settings
        """The settings of the run's last start, with those of the command line, as far as they had
        to be read."""
        self._ranks = ranks
        self._wanted = wanted
        self._progress_shown = time.monotonic()

    @classmethod
    def of(cls, arguments: argparse.Namespace, *, settings: bool | Config = True) -> RunSessions:
        """Return the sessions that a command line names; raises as :func:`ranks_of`.

        ``settings``: the run's own, if they were read; False if they are not needed, and need not
        be readable.
        """
        own = overrides_of(arguments)
        config = load_config(arguments.config, own)
        run_dir = run_dir_of(config)
        saved = run_dir.path / "config.yaml"
        needed = run_dir.journals is None or settings
        if isinstance(settings, Config):
            last = settings
        else:
            last = load_config(saved, own, environ={}) if needed and saved.is_file() else config
        if run_dir.journals is None:
            # The journals lie where the run's last start kept them.
            run_dir = run_dir_of(config.model_copy(update={"server": last.server}))
        ranks = ranks_of(run_dir)
        if missing := set(arguments.rank or ()) - set(ranks):
            raise ConfigError(
                f"there is no rank {min(missing)} in {run_dir.path}; choose among {ranks}"
            )
        chosen = sorted(set(arguments.rank)) if arguments.rank else ranks
        wanted = ExportFilter(arguments.state or (), arguments.task, arguments.since)
        return cls(run_dir, chosen, wanted, last)

    def records(
        self, report: Report, wanted: ExportFilter | None = None
    ) -> Iterator[SessionRecord]:
        """Iterate over the sessions in the order of creation; show the progress.

        ``wanted``: others than those of the command line. Raises as :func:`read_rank`.
        """
        wanted = wanted or self._wanted
        each = [
            read_rank(self.dir.journal(rank), self.dir.archive, rank, wanted, report)
            for rank in self._ranks
        ]
        merged = heapq.merge(*each, key=lambda found: found.created_at)
        for number, found in enumerate(merged, 1):
            yield found
            if time.monotonic() - self._progress_shown > _PROGRESS_INTERVAL:
                self._progress_shown = time.monotonic()
                print(f"{number} sessions read so far", file=sys.stderr)

    def read(
        self, report: Report, wanted: ExportFilter | None = None
    ) -> Iterator[tuple[SessionRecord, ArchiveRecord]]:
        """Iterate over `records` with what their lines say; ``report`` gets damaged ones."""
        for found in self.records(report, wanted):
            try:
                record = read_record(found.line)
            except (ValueError, KeyError, AnyAgentError) as error:
                report(f"session {found.session_id} is left out: {error}")
                continue
            yield found, record


def ranks_of(run_dir: RunDir) -> list[int]:
    """Return the ranks that have journals or archives.

    Raises NotFound, which lists the trials, where there is no such one; ConfigError without any.
    """
    folders = (run_dir.journal(0).parent, run_dir.archive)
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    ranks = sorted({int(match[1]) for name in names if (match := _RANK.fullmatch(name))})
    if not ranks and not run_dir.path.is_dir():
        raise run_dir.no_trial("name it with root=, user=, --experiment and --trial")
    if not ranks:
        raise ConfigError(f"there are no sessions in {run_dir.path}; is root the right one?")
    return ranks


def find_session(run_dir: RunDir, session_id: str, report: Report) -> ArchiveRecord | None:
    """Return a session of any rank, None for an unknown or deleted one; raises as
    :func:`read_rank`, and ValueError for a damaged one."""
    wanted = ExportFilter(session_id=session_id)
    for rank in ranks_of(run_dir):
        for found in read_rank(run_dir.journal(rank), run_dir.archive, rank, wanted, report):
            return read_record(found.line)
    return None


def newest_session(run_dir: RunDir) -> str | None:
    """Return the id of the latest session that has ended, of any rank, with its calls in a journal;
    None without any. Raises as :func:`read_rank`."""
    newest: tuple[float, str] | None = None
    for rank in ranks_of(run_dir):
        if (journal := run_dir.journal(rank)).exists():
            with closing(JournalReader(journal)) as reader:
                newest = max(filter(None, (newest, reader.newest())), default=None)
    return newest[1] if newest is not None else None


def read_rank(
    journal: Path, folder: Path, rank: int, wanted: ExportFilter, report: Report
) -> Iterator[SessionRecord]:
    """Iterate over a rank's sessions; ``report`` gets what is damaged or missing.

    Raises:
        StartupError: the journal cannot be read at all.
    """
    if not journal.exists():
        archives = ArchiveFolder(lambda: list_archives(folder, rank), report)
        yield from _read_archives(archives, rank, wanted, report)
        return
    with closing(JournalReader(journal)) as reader:
        foreign = _foreign_archives(reader, folder, rank)
        earlier = _read_archives(ArchiveFolder(lambda: foreign, report), rank, wanted, report)

        def own() -> list[ArchiveFile]:
            return [file for file in list_archives(folder, rank) if file not in foreign]

        mine = _read_journal(reader, ArchiveFolder(own, report), wanted, report)
        yield from heapq.merge(earlier, mine, key=lambda found: found.created_at)


def _foreign_archives(reader: JournalReader, folder: Path, rank: int) -> list[ArchiveFile]:
    """Return the archives of an earlier journal that is gone."""
    out = []
    for file in list_archives(folder, rank):
        # Damage is reported when the file's content is read.
        first = first_session(file, lambda _: None)
        if first is not None and not reader.has(first):
            out.append(file)
    return out


def _read_archives(
    archives: ArchiveFolder, rank: int, wanted: ExportFilter, report: Report
) -> Iterator[SessionRecord]:
    """Iterate over the sessions of archives whose journal is gone."""
    for line in archives.all():
        try:
            session = read_record(line).session
            found = SessionRecord(session["created_at"], session["id"], line, archived=True)
            if wanted.matches(session):
                yield found
        except (ValueError, KeyError) as error:
            report(f"a line of rank {rank}'s archives is damaged: {error}")


def _read_journal(
    reader: JournalReader, archives: ArchiveFolder, wanted: ExportFilter, report: Report
) -> Iterator[SessionRecord]:
    for found in reader.sessions(wanted):
        if isinstance(found, DamagedSession):
            report(f"session {found.id} is damaged in the journal: {found.problem}")
            continue
        row, archived = found.row, found.row.content != "stored"
        if archived:
            line = archives.find(found.number, row.id)
            if line is None:
                if not reader.is_deleted(found.number):
                    report(f"session {row.id} is in no archive that can be read")
                continue
        else:
            line = record_line(found.number, row, found.rewards, found.interactions)
        yield SessionRecord(row.created_at, row.id, line, archived)


class Credited(NamedTuple):
    """A session's calls of the policy, with their rewards as they ran back through the tree."""

    tree: InteractionTree
    rewards: dict[str, float]
    rewarded: bool
    """False if no reward was given at all, so that the session differs from one that was given
    0."""


def credited(record: ArchiveRecord, discount: float) -> Credited:
    """Return a session's calls without those of frozen models, and their propagated rewards."""
    final = record.session["final_reward"]
    calls = [call for call in record.interactions if not is_frozen(call)]
    tree = InteractionTree.from_interactions(calls)
    rewards = propagate_rewards(tree, discount=discount, final_reward=final)
    rewarded = final is not None or any(call.reward is not None for call in calls)
    return Credited(tree, rewards, rewarded)


def rows(record: ArchiveRecord, style: str, discount: float) -> Iterator[dict[str, Any]]:
    """Iterate over the rows of a session in a style, with arrays of numpy, without frozen calls.

    Rewards run back through the session's tree. They are null if the session was given none at all.

    Raises:
        Unprocessable: a path of the tree is not an exact token sequence, which `concat` needs.
    """
    session = record.session
    tree, rewards, rewarded = credited(record, discount)
    found: dict[str, Any]
    found = _messages(tree, rewards) if style == "messages" else export_rows(tree, rewards, style)
    for id, row in found.items():
        line = {"session_id": session["id"], "interaction_id": id, **about(session), **row}
        if not rewarded:
            line["reward" if style == "messages" else "rewards"] = None
        yield line


def about(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return what rows of every kind say of their session, beside its id."""
    return {name: session[name] for name in ("group_id", "task_id", "state", "reason", "step")}


def row_line(row: dict[str, Any]) -> bytes:
    """Return a row as a line of JSON."""
    return json.dumps(row, default=np.ndarray.tolist).encode() + b"\n"


def _messages(tree: InteractionTree, rewards: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Return each conversation, with its reward, by its last call; discarded calls are left out."""
    gone = discarded(tree)
    kept = [node for node in tree if node.id not in gone]
    continued = {node.parent_id for node in kept}
    return {
        node.id: {
            "messages": [*tree.messages(node.id), node.output_message],
            "tools": tree.path(node.id)[0].tools,
            "reward": rewards[node.id],
        }
        for node in kept
        if node.id not in continued
    }
