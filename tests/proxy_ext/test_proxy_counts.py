"""Counts of sessions balance, and are the journal's, whatever happens to sessions and proxies."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from any_agent.config import Config, load_config
from any_agent.errors import StoreUnavailable
from any_agent.keys import KeySigner
from any_agent.protocol import Ack, Lease, Rejection, StartSession
from any_agent.types import TERMINAL_STATES, SessionMode, SessionState
from proxy_ext.counts import SessionCounts
from proxy_ext.journal import PutSession, SetState, SQLiteJournal, Statement
from proxy_ext.leases import Leases
from proxy_ext.names import Names
from proxy_ext.opening import Opening
from proxy_ext.session import Session
from proxy_ext.sessions import Sessions
from tests.proxy_ext.journal_lab import make_interaction, make_row

STEPS = ("open", "finalize", "abort", "expire", "lease", "train", "reject", "lapse", "restart")
STEPS += ("replay",)
OWNER = "trainer"


class Rank:
    """The sessions of a rank over a journal on disk, without HTTP."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._folder = folder
        self._config = config

    async def start(self) -> None:
        """A proxy's start; what an earlier one had in memory is gone."""
        self.journal = SQLiteJournal(self._folder / "rank-0.sqlite")
        self.sessions = Sessions(self.journal, self._config.sessions, Names(0), rank=0)
        await self.sessions.recover(lease_ttl=60)
        self.sessions.admission.set_limit(10**6, 3600)
        self.leases = Leases(self.sessions, ttl=60)
        signer = KeySigner(bytes(32))
        self.opening = Opening(self.sessions, signer, self._config.sessions, largest_group=8)

    def some(self, state: SessionState, random: Random, most: int) -> list[Session]:
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
        }
        await actions[step](random)

    async def _open(self, random: Random) -> None:
        task = random.choice([None, None, "a", "b"])
        mode = random.choice(["train", "train", "eval"])
        body = StartSession(task_id=task, mode=mode, group_size=2 if task else None)
        session, _ = await self.opening.open(body)
        interaction = make_interaction(f"i-{session.id}", session.id)
        await self.sessions.record(session, interaction, session.id.encode())

    async def _finalize(self, random: Random) -> None:
        for session in self.some(SessionState.OPEN, random, 3):
            await self.sessions.finalize(session, 1.0)

    async def _abort(self, random: Random) -> None:
        for session in self.some(SessionState.OPEN, random, 1):
            await self.sessions.end(session, SessionState.ABORTED, "by a test")

    async def _expire(self, random: Random) -> None:
        for session in self.some(SessionState.OPEN, random, 1):
            session.expires = 0.0
        await self.sessions.expire()

    async def _lease(self, random: Random) -> None:
        await self.leases.lease(Lease(owner=OWNER, wait=0, max_groups=random.randint(1, 3)))

    async def _train(self, random: Random) -> None:
        ids = [s.id for s in self.some(SessionState.LEASED, random, 2)]
        await self.leases.ack(Ack(owner=OWNER, trained=ids))

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
        ids = [row.id for row in random.sample(ended, min(2, len(ended)))]
        await self.leases.replay(ids, OWNER)

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


async def walk(folder: Path, steps: list[str], seed: int) -> SessionCounts:
    config = load_config(None, ["sessions.group_size=2", "rollout.batch_size=8"], {})
    rank = Rank(folder, config)
    random = Random(seed)
    await rank.start()
    try:
        for step in steps:
            await rank.do(step, random)
            await require_balance(rank)
        return rank.sessions.counts
    finally:
        await rank.journal.close()


@settings(max_examples=30, deadline=None)
@given(steps=st.lists(st.sampled_from(STEPS), max_size=40), seed=st.integers(0, 10**6))
@example(steps=["open"] * 20 + list(STEPS) * 3, seed=1)
def test_counts_balance_on_random_walks(steps: list[str], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(walk(Path(folder), steps, seed))


def test_a_long_walk_reaches_every_state(tmp_path: Path) -> None:
    random = Random(0)
    counts = asyncio.run(walk(tmp_path, random.choices(STEPS, [8, *[1] * 9], k=400), 0))
    reached = {state for (_, state), number in counts.now.items() if number}
    assert reached >= TERMINAL_STATES
    assert counts.created["train"] > 50 and counts.created["eval"] > 20


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
    opening = asyncio.create_task(rank.opening.open(StartSession()))
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
