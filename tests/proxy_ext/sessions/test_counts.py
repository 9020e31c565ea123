"""Counts of sessions balance, and are the journal's, whatever happens to sessions and proxies."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from any_agent.auth.access import ANYONE
from any_agent.config import Config, load_config
from any_agent.errors import StoreUnavailable
from any_agent.keys import KeySigner
from any_agent.protocol.rl import StartSession
from any_agent.protocol.training import Ack, Lease, Rejection
from any_agent.types import TERMINAL_STATES, SessionMode, SessionState
from proxy_ext.admission.fleet_place import FleetPlace
from proxy_ext.admission.open_session import SessionOpener
from proxy_ext.archive.archiver import Archiver
from proxy_ext.archive.records import read_record
from proxy_ext.journal import PutSession, SetState, SQLiteJournal, Statement
from proxy_ext.leases import Fence, LeaseManager
from proxy_ext.run_state import RunState
from proxy_ext.sessions.endings import SessionEnder
from proxy_ext.sessions.expiry import SessionExpirer
from proxy_ext.sessions.ids import SessionIds
from proxy_ext.sessions.rewards import RewardBook
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.web.quotas import TenantQuotas
from tests.proxy_ext.archive.test_files import archives_of
from tests.support.journal import make_interaction, make_row

STEPS = ("open", "finalize", "abort", "expire", "lease", "train", "reject", "lapse", "restart")
STEPS += ("replay", "archive")
OWNER = "trainer"


class Rank:
    """The sessions of a rank over a journal on disk, without HTTP."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._folder = folder
        self._config = config
        self.step = 0
        self.oldest_step: int | None = None

    async def start(self) -> None:
        """A proxy's start; what an earlier one had in memory is gone."""
        self.journal = SQLiteJournal(self._folder / "rank-0.sqlite")
        self.sessions = SessionStore(self.journal, self._config.sessions, SessionIds(0), rank=0)
        await self.sessions.recover(lease_ttl=60)
        self.sessions.admission.set_limit(10**6, 3600)
        rewards = RewardBook(self.sessions)
        self.archive = Archiver(
            self.sessions,
            self._folder / "archive",
            about={},
            keep_seconds=0,
            oldest_step=lambda: self.oldest_step,
        )
        await self.archive.recover()
        self.endings = SessionEnder(
            self.sessions,
            rewards,
            needed=lambda row: False,
            unarchive=self.archive.remove,
        )
        self.expiry = SessionExpirer(self.sessions, self.endings)
        self.leases = LeaseManager(self.sessions, Fence(self.journal), ttl=60)
        self.opening = SessionOpener(
            self.sessions,
            self.endings,
            KeySigner(bytes(32)),
            run=cast(RunState, SimpleNamespace(version=0, require_training=lambda: None)),
            quotas=TenantQuotas(lambda *_: None, ranks=1, open_sessions=lambda _: 0),
            fleet=FleetPlace(None, 0, 1),
            largest_group=8,
            public_url="http://x",
        )

    def some(self, state: SessionState, random: Random, most: int) -> list[RecordedSession]:
        found = [s for s in self.sessions.live.values() if s.state is state]
        random.shuffle(found)
        return found[:most]

    async def do(self, step: str, random: Random) -> None:
        actions: dict[str, Callable[[Random], Awaitable[Any]]] = {
            "open": self._open,
            "finalize": self._finalize,
            "abort": self._abort,
            "expire": self._expire,
            "lease": self._lease,
            "train": self._train,
            "reject": self._reject,
            "lapse": self._lapse,
            "restart": self._restart,
            "replay": self._replay,
            "archive": self._archive,
        }
        await actions[step](random)

    async def _open(self, random: Random) -> None:
        task = random.choice([None, None, "a", "b"])
        mode = random.choice(["train", "train", "eval"])
        body = StartSession(task_id=task, mode=mode, group_size=2 if task else None)
        started = await self.opening.open(body, ANYONE)
        session = self.sessions.live[started.session_id]
        interaction = make_interaction(f"i-{session.id}", session.id)
        await self.sessions.record(session, interaction, session.id.encode(), None)

    async def _finalize(self, random: Random) -> None:
        for session in self.some(SessionState.OPEN, random, 3):
            await self.endings.finalize(session, {None: 1.0}, by="a test")

    async def _abort(self, random: Random) -> None:
        for session in self.some(SessionState.OPEN, random, 1):
            await self.endings.abort(session, "by a test")

    async def _expire(self, random: Random) -> None:
        for session in self.some(SessionState.OPEN, random, 1):
            session.opened = -1e9
            self.sessions.watch(session)
        await self.expiry.sweep()

    async def _lease(self, random: Random) -> None:
        await self.leases.lease(Lease(owner=OWNER, wait=0, max_groups=random.randint(1, 3)))

    async def _train(self, random: Random) -> None:
        ids = [s.id for s in self.some(SessionState.LEASED, random, 2)]
        self.step += 1
        await self.leases.ack(Ack(owner=OWNER, trained=ids, step=self.step))

    async def _reject(self, random: Random) -> None:
        chosen = self.some(SessionState.LEASED, random, 2)
        why = [Rejection(session_id=s.id, reason="stale") for s in chosen]
        await self.leases.ack(Ack(owner=OWNER, rejected=why))

    async def _lapse(self, random: Random) -> None:
        for session in self.some(SessionState.LEASED, random, 2):
            session.lease_expires = 0.0
        await self.leases.expire()

    async def _replay(self, random: Random) -> None:
        """A resume from before some step: out of `trained` and `rejected` again."""
        ended = await self.journal.sessions([SessionState.TRAINED, SessionState.REJECTED])
        ended = [row for row in ended if row.content == "stored"]
        ids = [row.id for row in random.sample(ended, min(2, len(ended)))]
        await self.leases.replay(ids, OWNER)

    async def _archive(self, random: Random) -> None:
        self.oldest_step = random.randint(0, self.step)
        await self.archive.sweep()

    async def _restart(self, _: Random) -> None:
        await self.journal.close()
        await self.start()


async def require_balance(rank: Rank) -> None:
    counts = rank.sessions.counts
    shown = {key: number for key, number in counts.now.items() if number}
    assert shown == await rank.journal.counts()
    for mode in SessionMode:
        assert counts.created[mode] == sum(counts.now[mode, state] for state in SessionState)
    live = Counter((s.row.mode, s.state) for s in rank.sessions.live.values())
    assert all(shown[key] == number for key, number in live.items())


def require_index(rank: Rank) -> None:
    """What a poll finds is what a look at every session finds, and so is the capacity."""
    sessions = rank.sessions
    live = list(sessions.live.values())
    leased = {s.id for s in live if s.state is SessionState.LEASED}
    assert {s.id for s in sessions.lease_index.leased} == leased
    waiting: dict[str, list[RecordedSession]] = {}
    for s in live:
        if s.mode is SessionMode.TRAIN and s.state is SessionState.FINALIZED:
            group = sessions.groups.get(s.row.group_id) if s.row.group_id else None
            if s.row.group_id is None or (group and group.closed and not group.has_leased):
                waiting.setdefault(s.row.group_id or s.id, []).append(s)
    ages = {key: min(s.row.created_at for s in members) for key, members in waiting.items()}
    expected = [{s.id for s in waiting[key]} for key in sorted(waiting, key=ages.__getitem__)]
    assert [{s.id for s in members} for members in sessions.lease_index.first(10**6)] == expected
    train = Counter(s.state for s in live if s.mode is SessionMode.TRAIN)
    capacity = rank.leases.capacity()
    assert capacity.running == train[SessionState.OPEN]
    assert capacity.buffered == train.total() - train[SessionState.OPEN]


async def require_content(rank: Rank) -> None:
    """Every session is recorded once: in the journal or in an archive."""
    archived = {read_record(line).session["id"] for line in archives_of(rank.archive._folder).all()}
    for row in await rank.journal.sessions(SessionState):
        stored = bool(await rank.journal.interactions(row.id))
        assert stored is (row.content == "stored"), row
        assert (row.id in archived) is (row.content == "archived"), row
    assert rank.archive.sessions == len(archived)


async def walk(folder: Path, steps: list[str], seed: int) -> Rank:
    config = load_config(None, ["sessions.group_size=2", "rollout.batch_size=8"], {})
    rank = Rank(folder, config)
    random = Random(seed)
    await rank.start()
    try:
        for step in steps:
            await rank.do(step, random)
            await require_balance(rank)
            require_index(rank)
            if step in ("archive", "replay", "restart"):
                await require_content(rank)
        return rank
    finally:
        await rank.journal.close()


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=40), seed=st.integers(0, 10**6))
@example(steps=["open"] * 20 + list(STEPS) * 3, seed=1)
def test_counts_balance_on_random_walks(steps: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(walk(Path(folder), steps, seed))


@pytest.mark.service
def test_a_long_walk_reaches_every_state(tmp_path: Path) -> None:
    random = Random(0)
    rank = asyncio.run(walk(tmp_path, random.choices(STEPS, [8, *[1] * 10], k=400), 0))
    counts = rank.sessions.counts
    reached = {state for (_, state), number in counts.now.items() if number}
    assert reached >= TERMINAL_STATES
    assert counts.created["train"] > 50 and counts.created["eval"] > 20
    assert rank.archive.sessions > 20


async def test_an_open_that_is_abandoned_while_it_is_written_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, load_config(None, [], {}))
    await rank.start()
    commit, writing, go = rank.journal.commit, asyncio.Event(), asyncio.Event()

    async def slow(*statements: Statement) -> None:
        writing.set()
        await go.wait()
        await commit(*statements)

    monkeypatch.setattr(rank.journal, "commit", slow)
    opening = asyncio.create_task(rank.opening.open(StartSession(), ANYONE))
    await writing.wait()
    opening.cancel()
    go.set()
    await asyncio.wait([opening])
    assert opening.cancelled()
    await require_balance(rank)
    assert rank.sessions.counts.now["train", SessionState.ABORTED] == 1
    await rank.journal.close()


async def test_a_change_that_cannot_be_written_changes_no_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path, load_config(None, [], {}))
    await rank.start()
    random = Random(0)
    for step in ("open", "open", "finalize", "lease", "open", "open"):
        await rank.do(step, random)
    before = dict(rank.sessions.counts.now)

    async def full(*_: Statement) -> None:
        raise StoreUnavailable("no space left")

    monkeypatch.setattr(rank.journal, "commit", full)
    for step in ("open", "finalize", "abort", "train", "reject", "lapse"):
        with pytest.raises(StoreUnavailable):
            await rank.do(step, random)
    assert dict(rank.sessions.counts.now) == before
    await require_balance(rank)
    await rank.journal.close()


async def test_the_journal_counts_by_mode_and_state(tmp_path: Path) -> None:
    journal = SQLiteJournal(tmp_path / "j.sqlite")
    assert await journal.counts() == {}
    rows = [make_row(f"s{k}", mode="eval" if k % 3 == 0 else "train") for k in range(7)]
    await journal.commit(*(PutSession(row) for row in rows))
    await journal.commit(SetState(("s1", "s2"), SessionState.EXPIRED))
    assert await journal.counts() == {
        ("train", SessionState.OPEN): 2,
        ("train", SessionState.EXPIRED): 2,
        ("eval", SessionState.OPEN): 3,
    }
    await journal.close()
