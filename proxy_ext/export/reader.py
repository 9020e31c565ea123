"""The sessions of one rank, read from its journal and its archives, and their export as rows.

A running service does not wait for the reader, which finds what is archived meanwhile.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from any_agent.record import (
    InteractionTree,
    discarded,
    export_rows,
    is_frozen,
    propagate_rewards,
)
from any_agent.record import to_json as row_to_json
from proxy_ext.archive.files import ArchiveFile, ArchiveFolder, Report, first_session, list_archives
from proxy_ext.archive.records import ArchiveRecord, read_record, record_line
from proxy_ext.journal.reader import DamagedSession, ExportFilter, JournalReader


class SessionRecord(NamedTuple):
    """One session as a line of JSON."""

    created_at: float
    session_id: str
    line: bytes
    """The session as in :mod:`proxy_ext.archive.records`."""
    archived: bool


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
            if wanted.matches(session["state"], session["task_id"], session["created_at"]):
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


def rows(record: ArchiveRecord, style: str, discount: float) -> Iterator[bytes]:
    """Iterate over the rows of a session in a style, as lines of JSON, without frozen calls.

    Rewards run back through the session's tree. They are null if the session was given none at all,
    so that it differs from a session that was given 0.

    Raises:
        Unprocessable: a path of the tree is not an exact token sequence, which `concat` needs.
    """
    session = record.session
    calls = [call for call in record.interactions if not is_frozen(call)]
    tree = InteractionTree.from_interactions(calls)
    rewards = propagate_rewards(calls, discount=discount, final_reward=session["final_reward"])
    rewarded = session["final_reward"] is not None or any(call.reward is not None for call in calls)
    about = {name: session[name] for name in ("group_id", "task_id", "state", "step")}
    if style == "messages":
        found = _messages(tree, rewards)
    else:
        found = {id: row_to_json(row) for id, row in export_rows(tree, rewards, style).items()}
    for id, row in found.items():
        line = {"session_id": session["id"], "interaction_id": id, **about, **row}
        if not rewarded:
            line["reward" if style == "messages" else "rewards"] = None
        yield json.dumps(line).encode() + b"\n"


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
