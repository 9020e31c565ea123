"""Slots, groups, counts and records, whatever happens to sessions, the store and the process."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from any_agent.auth.access import Caller, Scope
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    StoreUnavailable,
    TooManyRequests,
    Unprocessable,
)
from any_agent.keys import KeySigner
from any_agent.protocol.rl import StartSession
from any_agent.protocol.training import Ack, Lease, Rejection
from any_agent.types import TERMINAL_STATES, SessionMode, SessionState
from proxy_ext.admission.fleet_place import FleetPlace
from proxy_ext.admission.open_session import SessionOpener
from proxy_ext.archive.records import read_record
from proxy_ext.journal import SessionRow, Statement
from proxy_ext.leases import Fence, LeaseManager
from proxy_ext.run_state import RunState
from proxy_ext.sessions import expiry, groups, indexes, session_store
from proxy_ext.sessions import session as clock
from proxy_ext.sessions.endings import SessionEnder
from proxy_ext.sessions.expiry import SessionExpirer
from proxy_ext.sessions.groups import Group
from proxy_ext.sessions.rewards import RewardBook
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.web.quotas import TenantQuotas
from tests.proxy_ext.archive.test_files import archives_of
from tests.support.archives import Rank
from tests.support.journal import make_interaction
from tests.support.sessions import unwritable

OWNER = "trainer"
GROUP_TIMEOUT = 1000.0
SIZE = 3
LEAST = 2
NAMES = ("a", "b", None)
"""Of groups by name; None: by task."""


class World:
    """Time that a test sets, also for the ages of what the journal holds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passed = 0.0
        self._born: dict[str, float] = {}
        clocked = SimpleNamespace(monotonic=lambda: time.monotonic() + self.passed)
        patch.setattr(groups, "time", clocked)
        patch.setattr(expiry, "time", clocked)
        age = clock.session_age
        patch.setattr(
            session_store, "session_age", lambda row: age(row) + self.passed - self._of(row)
        )

    def _of(self, row: SessionRow) -> float:
        """How late it was when a session was opened; it is looked at after each step."""
        return self._born.setdefault(row.id, self.passed)

    def look(self, rows: list[SessionRow]) -> None:
        for row in rows:
            self._of(row)


class Walker(Rank):
    """One rank's sessions over a journal on disk, without HTTP."""

    def __init__(self, folder: Path, settings: tuple[str, ...], world: World, seed: int) -> None:
        super().__init__(folder, settings=settings)
        self._world = world
        self._random = Random(seed)
        self.limit = 0
        self.waiting: set[asyncio.Task[Any]] = set()
        self.handed_out: dict[str, set[str]] = {}
        """Members of each group that was leased, as they were then."""
        self._may_come_again: set[str] = set()
        """Groups whose leases ran out."""
        self.small: set[str] = set()
        """Groups that were rejected for their size."""
        self.reached: set[SessionState] = set()
        self._recorded: set[str] = set()
        """Sessions that have a call for sure."""
        self._step = 0

    async def start(self) -> Walker:
        """A proxy's start; what an earlier one had in memory is gone."""
        await super().start()
        sessions = self.sessions
        sessions.admission.set_limit(self.limit, 3600)
        self.leases = LeaseManager(sessions, Fence(self.journal), ttl=3600)
        self.endings = SessionEnder(
            sessions, RewardBook(sessions), needed=lambda _: False, unarchive=self.archive.remove
        )
        self.expiry = SessionExpirer(sessions, self.endings)
        run = cast(RunState, SimpleNamespace(version=0, require_training=lambda: None))
        quotas = TenantQuotas(
            lambda _, quota: 20 if quota == "open_sessions" else None,
            ranks=1,
            open_sessions=sessions.counts.undecided_of,
        )
        self.opening = SessionOpener(
            sessions,
            self.endings,
            KeySigner(bytes(32)),
            run=run,
            quotas=quotas,
            fleet=FleetPlace(None, 0, 1),
            largest_group=8,
            public_url="http://here",
        )
        return self

    async def settled(self) -> None:
        """Wait until nothing is being written: the journal does one thing after the other."""
        for _ in range(4):
            await self.journal.meta("nothing")
            await asyncio.sleep(0)

    # -- steps -----------------------------------------------------------------------------------

    async def do(self, step: str) -> None:
        action: Callable[[], Awaitable[None]] = getattr(self, f"step_{step}")
        await action()
        await self.settled()
        self._world.look(await self.journal.sessions(SessionState))

    def _body(self, wait: float) -> StartSession:
        name = self._random.choice(NAMES)
        size = self._random.choice((1, SIZE, SIZE, SIZE))
        if self._random.random() < 0.3:
            return StartSession(wait=wait, mode=self._random.choice(("train", "eval")))
        if name is None:
            return StartSession(task_id="t", group_size=SIZE, wait=wait)
        # One that closed is closed for good: its successor has a new name, now and then the old.
        number = self._random.choice((0, len(self.handed_out) + len(self.small)))
        return StartSession(group_id=f"{name}{number}-{size}", group_size=size, wait=wait)

    def _caller(self) -> Caller:
        tenant = self._random.choice(("alice", None))
        return Caller(Scope.TENANT if tenant else Scope.ADMIN, "somebody", tenant)

    async def step_admit(self) -> None:
        self.limit += self._random.randint(1, 4)
        self.sessions.admission.set_limit(self.limit, 3600)

    async def step_open(self) -> None:
        with suppress(TooManyRequests, Conflict):
            await self._opened(0.0)

    async def step_open_later(self) -> None:
        task = asyncio.create_task(self._opened(30.0))
        self.waiting.add(task)
        task.add_done_callback(self.waiting.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _opened(self, wait: float) -> None:
        caller = self._caller()
        answer = await self.opening.open(self._body(wait), caller)
        session = self.sessions.live[answer.session_id]
        assert session.row.tenant == caller.tenant
        interaction = make_interaction(f"i-{session.id}", session.id)
        await self.sessions.record(session, interaction, session.id.encode(), None)
        self._recorded.add(session.id)

    async def step_leave(self) -> None:
        """Somebody who waits for a slot goes away."""
        for task in list(self.waiting)[:1]:
            task.cancel()
            await asyncio.wait([task])

    async def step_leave_while_writing(self) -> None:
        task = asyncio.create_task(self._opened(0.0))
        for _ in range(self._random.randint(1, 4)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()

    async def step_fail(self) -> None:
        """A change that cannot be written."""
        change = self._random.choice(("open", "finalize", "abort", "train", "lapse"))
        with unwritable(self.journal), suppress(AnyAgentError):
            await getattr(self, f"step_{change}")()

    async def step_time_while_writing(self) -> None:
        """Every group's time runs out while a member is being written, which fails or not."""
        commit, fails = self.journal.commit, self._random.random() < 0.5

        async def slow(*statements: Statement) -> None:
            patch.undo()
            await self.step_time()
            if fails:
                raise StoreUnavailable("no space left")
            await commit(*statements)

        with pytest.MonkeyPatch.context() as patch, suppress(AnyAgentError):
            patch.setattr(self.journal, "commit", slow)
            await self._opened(0.0)

    def _some(self, *states: SessionState) -> list[RecordedSession]:
        found = [s for s in self.sessions.live.values() if s.state in states]
        self._random.shuffle(found)
        return found[: self._random.randint(1, 3)]

    async def step_finalize(self) -> None:
        for session in self._some(SessionState.OPEN, SessionState.AWAITING_REWARD):
            # One that its opener left has no call.
            with suppress(Unprocessable):
                await self.endings.finalize(session, {None: 1.0}, by="a test")

    async def step_await_reward(self) -> None:
        for session in self._some(SessionState.OPEN):
            await self.endings.await_reward(session, 60.0, by="a test")

    async def step_abort(self) -> None:
        for session in self._some(SessionState.OPEN, SessionState.AWAITING_REWARD)[:1]:
            keep = self._random.random() < 0.5
            await self.endings.abort(session, "by a test", keep_place=keep)

    async def step_expire(self) -> None:
        for session in self._some(SessionState.OPEN)[:1]:
            session.opened = -1e9
            self.sessions.watch(session)
        await self.expiry.sweep()

    async def step_veto(self) -> None:
        for session in self._some(SessionState.FINALIZED)[:1]:
            await self.endings.veto(session, "by a test")

    async def step_sweep(self) -> None:
        small = {g.id for g in self.sessions.groups.all() if g.too_small}
        await self.expiry.close_groups()
        self.small |= small

    async def step_time(self) -> None:
        """Every group's time runs out."""
        self._world.passed += 2 * GROUP_TIMEOUT
        await self.step_sweep()
        await self.step_sweep()

    async def step_lease(self) -> None:
        most = self._random.randint(1, 3)
        handed: dict[str, set[str]] = {}
        for trajectory in await self.leases.lease(Lease(owner=OWNER, wait=0, max_groups=most)):
            handed.setdefault(trajectory.group_id, set()).add(trajectory.session_id)
        for group_id, members in handed.items():
            await self._check_handed_out(group_id, members)

    async def _check_handed_out(self, group_id: str, members: set[str]) -> None:
        rows = await self.journal.group(group_id)
        if not rows:
            return
        assert not {row.state for row in rows} & {
            SessionState.OPEN,
            SessionState.AWAITING_REWARD,
            SessionState.FINALIZED,
        }, "a group is handed out whole"
        if group_id in self.handed_out:
            assert group_id in self._may_come_again, "a group is handed out once"
            self._may_come_again.discard(group_id)
        else:
            assert len(members) >= min(LEAST, rows[0].group_size)
        assert group_id not in self.small
        self.handed_out[group_id] = {row.id for row in rows}

    async def step_train(self) -> None:
        self._step += 1
        for group in self._leased_groups()[:1]:
            ids = [s.id for s in group]
            stale = [Rejection(session_id=ids[0], reason="stale")]
            ack = Ack(owner=OWNER, trained=ids[1:], rejected=stale, step=self._step)
            await self.leases.ack(ack)

    async def step_lapse(self) -> None:
        for group in self._leased_groups()[:1]:
            for session in group:
                session.lease_expires = 0.0
            self._may_come_again.add(group[0].row.group_id or group[0].id)
        await self.leases.expire()

    def _leased_groups(self) -> list[list[RecordedSession]]:
        by_group: dict[str, list[RecordedSession]] = {}
        for session in self.sessions.live.values():
            if session.state is SessionState.LEASED:
                by_group.setdefault(session.row.group_id or session.id, []).append(session)
        return list(by_group.values())

    async def step_replay(self) -> None:
        """A resume from before some step: out of `trained` and `rejected` again."""
        ended = await self.journal.sessions([SessionState.TRAINED, SessionState.REJECTED])
        had = [row.id for row in ended if row.content == "stored" and row.step is not None]
        await self.leases.replay(self._random.sample(had, min(2, len(had))), OWNER)

    async def step_archive(self) -> None:
        self.oldest_step = self._random.randint(0, self._step)
        await self.archive.sweep()

    async def step_restart(self) -> None:
        for task in list(self.waiting):
            task.cancel()
            await asyncio.wait([task])
        await self.journal.close()
        await self.start()

    # -- what always holds -------------------------------------------------------------------------

    async def check(self) -> None:
        admission, counts = self.sessions.admission, self.sessions.counts
        held = self.sessions.groups.reserved + sum(g.promised for g in self._groups)
        assert admission.admitted == counts.created[SessionMode.TRAIN] + held
        assert admission.admitted <= self.limit
        for group in self._groups:
            assert group.room >= 0 and len(group.members) <= group.size
            assert not group.done, "it would be kept for ever"
        for group_id, members in self.handed_out.items():
            rows = await self.journal.group(group_id)
            assert {row.id for row in rows} == members, "nobody joins what was handed out"
        await self._check_counts()
        self._check_leasable()

    async def _check_counts(self) -> None:
        counts = self.sessions.counts
        shown = {key: number for key, number in counts.now.items() if number}
        self.reached |= {state for _, state in shown}
        rows = await self.journal.sessions(SessionState)
        assert shown == await self.journal.counts() == Counter((r.mode, r.state) for r in rows)
        for mode in SessionMode:
            assert counts.created[mode] == sum(counts.now[mode, state] for state in SessionState)
        live = Counter((s.row.mode, s.state) for s in self.sessions.live.values())
        assert all(shown[key] == number for key, number in live.items())
        undecided = (SessionState.OPEN, SessionState.AWAITING_REWARD)
        assert counts.undecided == sum(shown.get((m, s), 0) for m in SessionMode for s in undecided)

    def _check_leasable(self) -> None:
        """What a poll finds is what a look at every session finds, and so is the capacity."""
        live = list(self.sessions.live.values())
        leased = {s.id for s in live if s.state is SessionState.LEASED}
        assert {s.id for s in self.sessions.lease_index.leased} == leased
        waiting: dict[str, list[RecordedSession]] = {}
        for s in live:
            if s.mode is SessionMode.TRAIN and s.state is SessionState.FINALIZED:
                group = self.sessions.groups.get(s.row.group_id) if s.row.group_id else None
                closed = group and group.closed and not group.has_leased and not group.too_small
                if s.row.group_id is None or closed:
                    waiting.setdefault(s.row.group_id or s.id, []).append(s)
        ages = {key: min(s.row.created_at for s in members) for key, members in waiting.items()}
        expected = [{s.id for s in waiting[key]} for key in sorted(waiting, key=ages.__getitem__)]
        found = self.sessions.lease_index.first(10**6)
        assert [{s.id for s in members} for members in found] == expected
        train = Counter(s.state for s in live if s.mode is SessionMode.TRAIN)
        capacity = self.leases.capacity()
        assert capacity.running == train[SessionState.OPEN]
        assert capacity.buffered == train.total() - train[SessionState.OPEN]

    async def check_content(self) -> None:
        """Every session is recorded once: in the journal or in an archive."""
        lines = archives_of(self.folder / "archive").all()
        archived = {read_record(line).session["id"] for line in lines}
        for row in await self.journal.sessions(SessionState):
            if await self.journal.interactions(row.id):
                assert row.content == "stored", row
            else:
                assert row.content != "stored" or row.id not in self._recorded, row
            assert (row.id in archived) is (row.content == "archived"), row
        assert self.archive.sessions == len(archived)

    @property
    def _groups(self) -> list[Group]:
        return self.sessions.groups.all()


STEPS = [name.removeprefix("step_") for name in vars(Walker) if name.startswith("step_")]
OFTEN = [*STEPS, *["admit", "lease", "train"] * 2, *["open"] * 8, *["finalize"] * 6]


async def walk(folder: Path, steps: list[str], seed: int) -> Walker:
    settings = (
        f"sessions.group_timeout={GROUP_TIMEOUT}",
        f"sessions.min_group_size={LEAST}",
        f"sessions.group_size={SIZE}",
        "rollout.batch_size=8",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexes, "MAX_PENDING", 1)
        rank = Walker(folder, settings, World(patch), seed)
        await rank.start()
        try:
            for step in steps:
                await rank.do(step)
                await rank.check()
                if step in ("archive", "replay", "restart"):
                    await rank.check_content()
            return rank
        finally:
            for task in list(rank.waiting):
                task.cancel()
            await rank.settled()
            await rank.journal.close()


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.sampled_from(OFTEN), max_size=60), seed=st.integers(0, 10**6))
@example(steps=["admit", "open"] * 8 + STEPS * 2, seed=3)
def test_slots_and_groups_are_right_after_any_sequence_of_events(
    steps: list[str], seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(walk(Path(folder), steps, seed))


@pytest.mark.service
def test_a_long_random_walk_reaches_every_fate_of_a_group(tmp_path: Path) -> None:
    random = Random(1)
    rank = asyncio.run(walk(tmp_path, random.choices(OFTEN, k=1000), 1))
    # Ids, and with them the order of groups, differ from run to run.
    assert len(rank.handed_out) > 3, "groups are handed out"
    assert rank.small, "groups are too small"
    counts = rank.sessions.counts
    assert rank.reached >= TERMINAL_STATES
    assert counts.created["eval"] > 20
    assert rank.archive.sessions > 20
