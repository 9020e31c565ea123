"""The endings of sessions: finalize, await a late reward, abort, expire, veto, delete."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from any_agent.auth.access import Caller
from any_agent.completions.untrainable import GUARDRAIL_VETO
from any_agent.errors import InvalidRequest, Unprocessable
from any_agent.protocol.rl import SessionInfo
from any_agent.record import InteractionTree, count_calls
from any_agent.types import SessionMode, SessionState
from proxy_ext.journal import (
    EraseContent,
    PutInteraction,
    SessionRow,
    SetAwaiting,
    SetReward,
    Statement,
)
from proxy_ext.journal.base import NO_PLACE, KeepAnswer, no_receipt
from proxy_ext.sessions.delivery import UNDELIVERED, undelivered, unreceived
from proxy_ext.sessions.rewards import NO_PARTS, Parts, RewardBook, author, judge_only, require_room
from proxy_ext.sessions.session import RecordedSession, abort_calls
from proxy_ext.sessions.session_store import SessionStore, ended, set_state
from proxy_ext.sessions.state_machine import Event, already_finalized, refusal, target

UNREWARDED = "no reward was given: it counts as 0 (sessions.require_reward=false)"
UNRECEIVED = "the grader rewarded only answers that are not known to have reached the agent"
_MAX_REPEATS = 64  # answers to repeated endings of a session that are stored
_MAX_COUNTED = 10_000  # sessions whose repeated endings are counted
_VETO = "vetoed: a guardrail refused an answer (litellm.policy_vetoes)"
_SETTLED_TIMEOUT = 30.0
"""Longest wait for calls that are being recorded; they take longer only if the store hangs."""


def _is_vetoed(session: RecordedSession) -> bool:
    """Return whether a guardrail keeps the whole session out of training."""
    return any(
        i.untrainable_reason == GUARDRAIL_VETO or i.request.get("vetoed", False)
        for i in session.tree
    )


class SessionEnder:
    """Ends sessions of one rank.

    ``needed`` returns whether a resume of the training may need a session. ``unarchive`` removes a
    session, whose lock is held, from the archives.
    """

    def __init__(
        self,
        sessions: SessionStore,
        rewards: RewardBook,
        *,
        needed: Callable[[SessionRow], bool],
        unarchive: Callable[[str], Awaitable[None]],
    ) -> None:
        self._sessions = sessions
        self._rewards = rewards
        self._config = sessions.config
        self._needed = needed
        self._unarchive = unarchive
        self._repeats: Counter[str] = Counter()
        """Number of repeated endings under an idempotency key, by session."""

    async def finalize(
        self,
        session: RecordedSession,
        final: Parts = NO_PARTS,
        *,
        by: str,
        keep: KeepAnswer = no_receipt,
    ) -> SessionInfo:
        """End a session: abort its calls under way; then nothing can be added but rewards.

        For a session that was finalized before the answer is its present state, or Conflict
        (`already_finalized`) if another final reward is given. SessionClosed if it ended otherwise,
        Unprocessable without anything to train on, or without a reward.
        """
        async with session.lock:
            state = target(session.row, Event.FINALIZE)
            if state is session.state:
                return await self._repeat(session, final, keep)
            row, rewards = await self._with_final_reward(session, final, by)
            self._require_calls(session)
            self._require_reward(session, row)
            train = state is SessionState.FINALIZED
            reason = UNREWARDED if train and not is_rewarded(session, row) else None
            return await self._close(session, ended(row, state, reason), rewards, keep)

    async def await_reward(
        self,
        session: RecordedSession,
        seconds: float | None = None,
        final: Parts = NO_PARTS,
        *,
        by: str,
        keep: KeepAnswer = no_receipt,
        for_judge: bool = False,
    ) -> SessionInfo:
        """End a session's calls; its rewards may still come for so many seconds.

        Like :meth:`finalize`, but no reward is needed. A session that already awaits its reward
        keeps its deadline. InvalidRequest for a deadline that is too far away. ``for_judge``: the
        default deadline is not before the end of its ttl.
        """
        longest = self._config.reward_deadline
        if seconds is not None and seconds > longest:
            raise InvalidRequest(
                f"deadline {seconds:g} exceeds sessions.reward_deadline ({longest:g} s); lower it",
                param="deadline",
            )
        async with session.lock:
            state = target(session.row, Event.AWAIT)
            if state is session.state:
                return await self._repeat(session, final, keep)
            row, rewards = await self._with_final_reward(session, final, by)
            self._require_calls(session)
            until = session.row_time(time.monotonic() + (seconds or longest))
            if for_judge and seconds is None:
                until = max(until, row.expires_at)
            row = replace(row, state=state, awaits_until=until)
            return await self._close(session, row, rewards, keep)

    async def end_by_agent(
        self,
        session: RecordedSession,
        caller: Caller,
        final: Parts,
        *,
        deadline: float | None = None,
        keep: KeepAnswer,
    ) -> SessionInfo:
        """End the calls of a session that others reward, at its agent's request; then it awaits
        them.

        Forbidden (`judge_only`) for a reward that is not the agent's to give, and for a deadline
        before which the judge would have to come; where `sessions.grader` is the judge, it decides
        at any deadline.
        """
        by = author(session.row, caller, gives=bool(final))
        rewards, late = session.row.rewarded_by, self._config.late_reward
        graded = rewards == "operator" or (rewards == "grader" and late == "grade")
        if deadline is not None and not graded:
            raise judge_only(session.row, "set the reward's deadline of")
        ending = self.await_reward(session, deadline, final, by=by, keep=keep, for_judge=True)
        return await ending

    async def abort(
        self,
        session: RecordedSession,
        reason: str,
        *,
        keep_place: bool = False,
        keep: KeepAnswer = no_receipt,
    ) -> SessionInfo:
        """Discard a session that is not finalized; SessionClosed for one that is.

        ``keep_place``: another session may take its place, if its group still takes members.
        """
        async with session.lock:
            row = ended(session.row, target(session.row, Event.ABORT), reason)
            await self._sessions.load(session)
            groups = self._sessions.groups
            if keep_place and row.group_id is not None and groups.is_newest(row.group_id):
                row = replace(row, owner=NO_PLACE)
            return await self._close(session, row, [], keep)

    async def expire(self, session: RecordedSession, reason: str) -> None:
        """End a session whose time ran out; SessionClosed if it has ended otherwise."""
        async with session.lock:
            row = ended(session.row, target(session.row, Event.EXPIRE), reason)
            # Without its tree: thousands may expire at once, and none is trained on.
            async with self._without_calls(session):
                await self._sessions.write(session, row, set_state(row))

    async def at_deadline(
        self,
        session: RecordedSession,
        *,
        final: Parts = NO_PARTS,
        calls: Mapping[str, Parts] | None = None,
        by: str = "",
        reason: str | None = None,
    ) -> bool:
        """End a session at its reward's deadline, and return whether it was rewarded by then.

        Otherwise it gets this final reward, and its calls those of ``calls`` by their ids, or it is
        rejected for this reason, or as no answer of ``calls`` reached the agent. SessionClosed if
        it has ended otherwise.
        """
        async with session.lock:
            await self._sessions.load(session)
            rewarded = is_rewarded(session)
            if rewarded:
                final, calls, reason = NO_PARTS, None, None
            if calls:
                # A grader names an answer because it is recorded, not because the agent has it.
                lost = {i.id for i in unreceived(session, for_good=True)}
                calls = {id: parts for id, parts in calls.items() if id not in lost}
                reason = None if calls or final else UNRECEIVED
            if session.mode is SessionMode.EVAL:
                state = SessionState.EVALUATED
            else:
                state = SessionState.REJECTED if reason else SessionState.FINALIZED
            target(session.row, Event.DEADLINE, state)
            row, rewards = await self._with_final_reward(session, final, by)
            own = {}
            for id, parts in (calls or {}).items():
                call = session.tree[id]
                given, own[id] = await self._rewards.combine(session, call, parts, by=by)
                rewards += given
            require_room(len(rewards))
            await self._close(session, ended(row, state, reason), rewards, no_receipt)
            for id, reward in own.items():
                session.tree[id].reward = reward
            return rewarded

    async def veto(
        self, session: RecordedSession, reason: str, *, keep: KeepAnswer = no_receipt
    ) -> SessionInfo:
        """Keep a finalized session out of training; Conflict or SessionClosed for others."""
        async with session.lock:
            state = target(session.row, Event.VETO)
            if self._needed(session.row):
                raise refusal(session.row, Event.VETO)
            await self._sessions.load(session)
            row = ended(session.row, state, f"vetoed: {reason}")
            return await self._write(session, row, [set_state(row)], keep)

    async def delete(
        self, session: RecordedSession, *, keep: KeepAnswer = no_receipt
    ) -> SessionInfo:
        """Erase a session's content, and end it if it is open; idempotent.

        Conflict (`in_training`) while the trainer has it, or a resume may need it.
        """
        async with session.lock:
            row = session.row
            state = target(row, Event.DELETE)
            if self._needed(row):
                raise refusal(row, Event.DELETE)
            if row.content == "deleted":
                return await self._repeat(session, NO_PARTS, keep)
            if state is not row.state:
                row = ended(row, state, "deleted")
            row = replace(row, content="deleted", metadata={})
            async with self._without_calls(session):
                empty = InteractionTree()
                answer = session.info(row, empty)
                if session.row.content == "archived":
                    # Before the write: after a kill in between a repetition finds no archive entry.
                    await self._unarchive(row.id)
                erased = (set_state(row), EraseContent((row.id,)))
                await self._sessions.write(session, row, *erased, *keep(answer))
                session.tree = empty
            return answer

    def keeps_repeat(self, session: RecordedSession) -> bool:
        """Return whether the answer to one more ending of an ended session is stored for its key.

        It changes nothing, so without a limit an agent could fill the journal by fresh keys.
        """
        if len(self._repeats) >= _MAX_COUNTED:
            self._repeats.clear()
        self._repeats[session.id] += 1
        return self._repeats[session.id] <= _MAX_REPEATS

    async def _repeat(
        self, session: RecordedSession, final: Parts, keep: KeepAnswer
    ) -> SessionInfo:
        """Return the answer to a repeated ending; Conflict for another final reward."""
        if not await self._rewards.matches_final(session, final):
            raise already_finalized(session.row)
        await self._sessions.load(session)
        answer = session.info()
        if keep is not no_receipt and self.keeps_repeat(session):
            await self._sessions.journal.commit(*keep(answer))
        return answer

    async def _with_final_reward(
        self, session: RecordedSession, final: Parts, by: str
    ) -> tuple[SessionRow, list[SetReward]]:
        """Return the row with the final reward, and the statements that write it."""
        await self._sessions.load(session)
        if not final:
            return session.row, []
        statements, value = await self._rewards.combine(session, None, final, by=by)
        return replace(session.row, final_reward=value), statements

    async def _close(
        self, session: RecordedSession, row: SessionRow, rewards: list[SetReward], keep: KeepAnswer
    ) -> SessionInfo:
        """End the session's calls, then write its new row."""
        async with self._without_calls(session):
            # After the last call: its answer may be the one that a guardrail refuses.
            if row.state is SessionState.FINALIZED and _is_vetoed(session):
                row = replace(row, state=SessionState.REJECTED, reason=_VETO)
            awaiting = row.state is SessionState.AWAITING_REWARD
            # Also answers that are still being sent: the session does not wait for their clients.
            unsent = unreceived(session, for_good=not awaiting)
            until = row.awaits_until or 0.0
            statements: list[Statement] = [
                *rewards,
                SetAwaiting(row.id, until) if awaiting else set_state(row),
                *(PutInteraction(undelivered(interaction)) for interaction in unsent),
            ]
            answer = await self._write(session, row, statements, keep, [i.id for i in unsent])
            self._rewards.count_given(rewards)
            for interaction in unsent:
                interaction.untrainable_reason = UNDELIVERED
            self._sessions.undelivered += len(unsent)
            if row.state is SessionState.FINALIZED:
                self._sessions.trainability.add(count_calls(session.tree))
        return answer

    async def _write(
        self,
        session: RecordedSession,
        row: SessionRow,
        statements: list[Statement],
        keep: KeepAnswer,
        undelivered: Collection[str] = (),
    ) -> SessionInfo:
        answer = session.info(row, undelivered=undelivered)
        await self._sessions.write(session, row, *statements, *keep(answer))
        return answer

    @asynccontextmanager
    async def _without_calls(self, session: RecordedSession) -> AsyncIterator[None]:
        """Abort the session's calls and refuse new ones; calls that are being recorded finish."""
        session.closing = True
        try:
            calls = [*session.calls, *session.frozen_calls]
            reason = "the session was ended while the call was under way"
            await abort_calls(calls, reason, seconds=_SETTLED_TIMEOUT)
            yield
        finally:
            session.closing = False

    def _require_calls(self, session: RecordedSession) -> None:
        needed = session.mode is SessionMode.TRAIN or session.row.implicit
        if needed and len(session.tree) == 0:
            raise Unprocessable(
                "the session has no model call, so there is nothing to reward; abort it instead",
                code="no_interactions",
            )

    def _require_reward(self, session: RecordedSession, row: SessionRow) -> None:
        if session.mode is not SessionMode.TRAIN or not self._config.require_reward:
            return
        if not is_rewarded(session, row):
            raise Unprocessable(
                "the session has no reward: POST /rl/v1/set_reward first (in Python: "
                "session.set_reward(...)), or finalize it by /rl/v1/finalize with final_reward, or "
                "with await_reward if it comes later (sessions.require_reward=false takes it as 0)",
                code="no_reward",
            )


def is_rewarded(session: RecordedSession, row: SessionRow | None = None) -> bool:
    """Return whether the session, or any of its interactions, has a reward."""
    final = (row or session.row).final_reward
    return final is not None or any(i.reward is not None for i in session.tree)
