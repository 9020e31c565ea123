"""Measure what sessions cost on the disk, and for how long: ``python benchmarks/retention.py``.

Sessions of some lengths are written through the journal's interface, with the answers to three
requests under an idempotency key (open, reward, finalize), then archived, then forgotten, as a rank
does it. Their token ids are random, so archives compress them less than those of real texts. With
``--write`` the table goes into docs/reference/archives.md.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from common import finish, machine, parser, ratio
from journal import Maker, size_of

from any_agent.config import SessionConfig
from any_agent.protocol.idempotency import ANSWER_TTL
from any_agent.types import Interaction, SessionState
from proxy_ext.archive.archiver import Archiver
from proxy_ext.journal import (
    Journal,
    PutAnswer,
    PutInteraction,
    PutSession,
    SessionRow,
    SetReward,
    SetState,
    SQLiteJournal,
)
from proxy_ext.journal.base import DropAnswers
from proxy_ext.sessions.ids import SessionIds
from proxy_ext.sessions.session_store import SessionStore

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "reference" / "archives.md"
SHAPES = {0: (0, 0), 1000: (2, 250), 4000: (8, 250), 16_000: (20, 400), 32_000: (40, 400)}
"""Turns of a session, and tokens of each prompt and each answer, by tokens in all. Those without
any tell what rows and answers cost: they are many, as SQLite gives space by pages of 16 KB."""
_MANY = 20
RATE = 1000  # sessions an hour
DAY = 24
_ANSWERS = (("start_session", 200), ("set_reward", 117), ("finalize", 337))
"""Requests with stored answers, and the bytes of these, as a service stored them."""


class Cost(NamedTuple):
    """Bytes of one session."""

    journal: float
    """Its content, in the journal."""
    archive: float
    answers: float
    row: float
    needed: float
    """Its tokens and messages."""


async def cost(folder: Path, tokens: int, count: int) -> Cost:
    """Write so many sessions, and measure what each step leaves."""
    path, archive = folder / f"{tokens}.sqlite", folder / f"archive-{tokens}"
    turns, each = SHAPES[tokens]
    empty = await _size(SQLiteJournal(path), path)
    journal, maker, needed = SQLiteJournal(path), Maker(), 0
    for _ in range(count):
        needed += await _write(journal, maker, turns, each)
    full = await _size(journal, path)
    journal = SQLiteJournal(path)
    store = SessionStore(journal, SessionConfig(), SessionIds(0), rank=0)
    archiver = Archiver(store, archive, about={}, keep_seconds=0.0, oldest_step=lambda: 0)
    while await archiver.sweep():
        pass
    archived = await _size(journal, path)
    journal = SQLiteJournal(path)
    await journal.commit(DropAnswers(time.time() + ANSWER_TTL))
    rows = await _size(journal, path)
    assert archiver.sessions == count
    sizes = (full - archived, archiver.bytes, archived - rows, rows - empty, needed)
    return Cost(*(size / count for size in sizes))


async def _write(journal: Journal, maker: Maker, turns: int, each: int) -> int:
    """Write a session that was rewarded and trained on; return the bytes of tokens and texts."""
    id, now = f"ses-0-{secrets.token_hex(8)}", time.time()
    lane, clock = secrets.token_hex(12), f"{secrets.token_hex(18)} 859.326"
    row = SessionRow(
        *(id, lane, "train", SessionState.OPEN, "task", f"group-{now:.0f}", 8, {}, now, now + 3600),
        opened_by="anyone",
        clock=clock,
    )
    told: list[Interaction] = []
    for _ in range(turns):
        parent = told[-1] if told else None
        told.append(maker.interaction(id, parent, prompt=each, output=each))
    answers = [
        PutAnswer(
            f"lane {lane} POST /rl/v1/{name}",
            secrets.token_hex(16),
            bytes(16),
            200,
            secrets.token_bytes(size),
            now,
        )
        for name, size in _ANSWERS
    ]
    await journal.commit(
        PutSession(row),
        *(PutInteraction(each, maker.key()) for each in told),
        SetReward(id, None, None, 0.5, f"lane {lane}", now, 0.5),
        SetState((id,), SessionState.TRAINED, step=0, at=now - 60),
        *answers,
    )
    return sum(map(size_of, told))


async def _size(journal: Journal, path: Path) -> int:
    """Close a journal whose free space is given back; return the bytes that it takes."""
    while await journal.trim():
        pass
    await journal.close()
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def table(costs: dict[int, Cost]) -> str:
    """Return the costs as Markdown: of a session, and of a day at one rate."""
    lines = [
        "| tokens of a session | in the journal | in an archive | answers, for a day | its row |",
        "|---|---|---|---|---|",
    ]
    for tokens, one in costs.items():
        cells = (one.journal, one.archive, one.answers, one.row)
        lines.append(f"| {tokens:,} | {' | '.join(map(_bytes, cells))} |")
    lines += [
        "",
        "| sessions an hour | tokens of each | journals, after a day | archives, more each day | "
        "rows, more each day |",
        "|---|---|---|---|---|",
    ]
    for tokens, one in costs.items():
        day = (one.journal + one.answers + one.row, one.archive, one.row)
        cells = [_bytes(RATE * DAY * each) for each in day]
        lines.append(f"| {RATE:,} | {tokens:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--write", action="store_true", help=f"write the table into {DOCUMENT.name}")
    args = flags.parse_args()
    count = 4 if args.smoke else 100 if args.quick else 400
    with tempfile.TemporaryDirectory() as folder:
        costs = {
            each: asyncio.run(cost(Path(folder), each, count if each else _MANY * count))
            for each in SHAPES
        }
    bare = costs.pop(0)
    costs = {n: c._replace(answers=bare.answers, row=bare.row) for n, c in costs.items()}
    text = table(costs)
    print(f"{machine()}; {count} sessions of each length\n\n{text}")
    ratio("journal / needed", costs[16_000].journal, costs[16_000].needed)
    ratio("archive / needed", costs[16_000].archive, costs[16_000].needed)
    if args.write:
        old = DOCUMENT.read_text(encoding="utf-8")
        marked = re.compile(r"(<!-- benchmarks/retention.py -->\n).*?(\n<!-- end -->)", re.S)
        about = f"Written by `python benchmarks/retention.py --write`, {machine()}:\n\n{text}"
        DOCUMENT.write_text(marked.sub(rf"\g<1>{about}\g<2>", old), encoding="utf-8")
    finish(args)


if __name__ == "__main__":
    main()
