"""Rewards: of an interaction or of the whole session, whole or by name, each with who and when.

An interaction's own reward, and the final reward, is the unnamed one + the sum of weight * value
over the named ones (`sessions.reward_weights`). All of them can be revised until the session is
handed to training. The journal keeps every reward that was ever set.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from any_agent.completions import completion_of
from any_agent.config import SessionConfig
from any_agent.errors import InvalidRequest, NotFound, Unprocessable
from any_agent.protocol.rl import RewardEntry, RewardSet, SessionDetails
from any_agent.types import Interaction, SessionState
from proxy_ext.journal import SessionRow, SetReward, SetState
from proxy_ext.journal.statements import KeepAnswer, no_receipt
from proxy_ext.sessions.delivery import last_received
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore, set_state
from proxy_ext.sessions.state_machine import Event, target

Parts: TypeAlias = Mapping[str | None, float]
"""What a reward is made of: values by name, None for the unnamed one."""
NOTHING: Parts = MappingProxyType({})

_MAX_NAMES = 64
"""Of one interaction, or of the final reward."""
_MAX_GIVEN = 10_000
"""To one session, before the last one: every revision is kept, and read when there is another."""
_SHOWN = 256
"""Rewards that a session's history shows: its last ones."""


def parts_of(
    value: float | Mapping[str, float] | None, name: str | None = None
) -> dict[str | None, float]:
    """A body's reward: a number, a number with a name, or several by name; nothing of None."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value.items())
    return {name: value}


class RewardBook:
    """Rewards of one rank's sessions."""

    def __init__(self, sessions: SessionStore, config: SessionConfig) -> None:
        self._sessions = sessions
        self._weights = config.reward_weights
        self.given: Counter[str] = Counter()
        """Rewards that were set, by what they are of: `completion` or `final`."""

    async def give(
        self,
        session: RecordedSession,
        parts: Parts,
        wanted: str | None,
        *,
        by: str,
        keep: KeepAnswer = no_receipt,
    ) -> RewardSet:
        """Reward one interaction: the last one by default.

        SessionClosed once the session is with the trainer, NotFound, Unprocessable for a name that
        has no weight, or if there is nothing to reward yet.
        """
        async with session.lock:
            target(session.row, Event.REWARD)
            await self._sessions.load(session)
            interaction = _chosen(session, wanted)
            before = interaction.reward
            statements, own = await self._set(session, interaction.id, before, parts, by)
            answer = RewardSet(session_id=session.id, interaction_id=interaction.id, reward=own)
            row, also = _counting(session.row)
            await self._sessions.write(session, row, *statements, *also, answer=answer, keep=keep)
            interaction.reward = own
            session.touch()
            self.count(statements)
            return answer

    async def give_final(
        self, session: RecordedSession, parts: Parts, *, by: str, keep: KeepAnswer = no_receipt
    ) -> RewardSet:
        """Set or revise the final reward; as :meth:`give`."""
        async with session.lock:
            target(session.row, Event.REWARD)
            statements, final = await self.final(session, parts, by=by)
            answer = RewardSet(session_id=session.id, interaction_id=None, reward=final)
            row, also = _counting(replace(session.row, final_reward=final))
            await self._sessions.write(session, row, *statements, *also, answer=answer, keep=keep)
            session.touch()
            self.count(statements)
            return answer

    async def final(
        self, session: RecordedSession, parts: Parts, *, by: str
    ) -> tuple[list[SetReward], float]:
        """What writes the final reward, and what it adds up to; under the session's lock.

        As :meth:`give_final`.
        """
        return await self._set(session, None, session.row.final_reward, parts, by)

    async def stands(self, session: RecordedSession, parts: Parts) -> bool:
        """Return whether the final reward has these parts; call under the session's lock."""
        before = session.row.final_reward
        if before is None or not parts:
            return not parts
        known, _ = await self._sessions.journal.reward_parts(session.id, None)
        if not known:
            # One from before histories were kept, or whose history is not here any more.
            return self._combined(parts) == before
        return all(known.get(name) == value for name, value in parts.items())

    def count(self, statements: Iterable[SetReward]) -> None:
        """They are written."""
        for statement in statements:
            self.given["final" if statement.interaction_id is None else "completion"] += 1

    async def history(self, session: RecordedSession) -> SessionDetails:
        """What is recorded of a session, with its last rewards."""
        async with session.lock:
            await self._sessions.load(session)
            info = session.info()
            rewards = await self._sessions.journal.rewards(session.id, last=_SHOWN)
            _, given = await self._sessions.journal.reward_parts(session.id, None)
        shown = [
            RewardEntry(
                interaction_id=r.interaction_id, name=r.name, value=r.value, by=r.by, at=r.at
            )
            for r in rewards
        ]
        return SessionDetails(**info.model_dump(), reward_history=shown, rewards_given=given)

    # ------------------------------------------------------------------------------------------

    async def _set(
        self,
        session: RecordedSession,
        interaction_id: str | None,
        before: float | None,
        parts: Parts,
        by: str,
    ) -> tuple[list[SetReward], float]:
        """The statements that add these parts to what there is, and the sum then."""
        self._require_known(parts)
        known: dict[str | None, float] = {}
        if before is not None:
            known, given = await self._sessions.journal.reward_parts(session.id, interaction_id)
            if given >= _MAX_GIVEN:
                raise Unprocessable(
                    f"the session was given {given} rewards, revised ones counted; that is the "
                    "most",
                    code="too_many_rewards",
                )
            # One from before histories were kept.
            known = known or {None: before}
        known |= parts
        if len(known) > _MAX_NAMES:
            raise Unprocessable(
                f"a reward may have at most {_MAX_NAMES} names", code="too_many_reward_names"
            )
        combined = self._combined(known)
        at = time.time()
        return [
            SetReward(session.id, interaction_id, name, value, by, at, combined)
            for name, value in parts.items()
        ], combined

    def _require_known(self, parts: Parts) -> None:
        if not self._weights:
            return
        unknown = next((n for n in parts if n is not None and n not in self._weights), None)
        if unknown is not None:
            raise Unprocessable(
                f"no weight is configured for a reward named {unknown!r}; sessions.reward_weights "
                f"knows {', '.join(sorted(self._weights))}",
                code="unknown_reward_name",
                param=unknown,
            )

    def _combined(self, parts: Parts) -> float:
        total = parts.get(None, 0.0)
        for name in sorted(n for n in parts if n is not None):
            # A name that has lost its weight since then weighs nothing any more.
            weight = self._weights.get(name, 0.0) if self._weights else 1.0
            total += weight * parts[name]
        return total


def _counting(row: SessionRow) -> tuple[SessionRow, list[SetState]]:
    """The row of a session that is rewarded now, and what writes it, if it was said to count as
    0."""
    if row.state is not SessionState.FINALIZED or row.reason is None:
        return row, []
    row = replace(row, reason=None)
    return row, [set_state(row)]


def _chosen(session: RecordedSession, wanted: str | None) -> Interaction:
    tree = session.tree
    if wanted is not None and wanted not in tree:
        # Any of them: the first one may still be sampled, or have failed.
        if any(completion_of(i.id) == wanted for i in tree):
            raise _choice_needed(wanted)
        raise NotFound(
            f"session {session.id} has no completion {wanted[:80]!r}", code="completion_not_found"
        )
    if len(tree) == 0:
        raise Unprocessable("the session has no completion to reward yet", code="no_interactions")
    if wanted is not None:
        return tree[wanted]
    last = last_received(session) or tree.last()
    if (completion := completion_of(last.id)) is not None:
        raise _choice_needed(completion)
    return last


def _choice_needed(completion: str) -> InvalidRequest:
    """Of several choices each is an interaction of its own, and none is the call's answer."""
    return InvalidRequest(
        f"completion {completion} has several choices, each with a reward of its own: name one by "
        f"its index, as completion_id {completion}.0",
        param="completion_id",
        code="choice_needed",
    )
