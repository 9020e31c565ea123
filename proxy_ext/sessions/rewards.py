"""Rewards of interactions and of whole sessions, unnamed or by name, each with its author and time.

A session's `rewards` say who may set them: its own key (`agent`), only others (`judge`), or both.

An interaction's own reward, and the final reward, is the unnamed one + the sum of weight * value
over the named ones (`sessions.reward_weights`). All of them can be revised until the session is
handed to training. The journal keeps every reward that was ever set.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import TypeAlias

from any_agent.auth.access import ANYONE, Caller, Scope
from any_agent.completions.call_types import completion_of
from any_agent.errors import Conflict, Forbidden, InvalidRequest, NotFound, Unprocessable
from any_agent.protocol.rl import RewardEntry, RewardSet, SessionDetails
from any_agent.types import Interaction, SessionState
from proxy_ext.journal.base import (
    KeepAnswer,
    RewardRow,
    SessionRow,
    SetReward,
    Statement,
    no_receipt,
)
from proxy_ext.sessions.delivery import last_received
from proxy_ext.sessions.session import RecordedSession, public_rewards
from proxy_ext.sessions.session_store import SessionStore, set_state
from proxy_ext.sessions.state_machine import Event, target

Parts: TypeAlias = Mapping[str | None, float]
"""The parts of a reward: values by name, None for the unnamed one."""
NO_PARTS: Parts = MappingProxyType({})

FEEDBACK = "feedback"  # the name of users' rewards
JUDGE_ONLY = "judge_only"  # the code of refusals
_AGENT = "session"  # the author of rewards by the agent where both may set them, or its beginning
_MAX_NAMES = 64  # names of one reward
MAX_GIVEN = 10_000  # rewards of one session: each revision is kept, and read at the next one
MAX_TEXTS = 128  # users' texts of one session: each reader of its history gets them all
_MAX_SHOWN = 256  # newest rewards in a session's history


def parts_of(
    value: float | Mapping[str, float] | None, name: str | None = None
) -> dict[str | None, float]:
    """Return the parts of a body's reward: a number, a named number, or several by name."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value.items())
    return {name: value}


def combined(parts: Parts, weights: Mapping[str, float]) -> float:
    """Return the reward that parts add up to, by the weights of their names, if there are any."""
    total = parts.get(None, 0.0)
    for name in sorted(n for n in parts if n is not None):
        # A name that is not configured any more has no weight.
        weight = weights.get(name, 0.0) if weights else 1.0
        total += weight * parts[name]
    return total


def is_agent(row: SessionRow, caller: Caller) -> bool:
    """Return whether a caller counts as the agent of a session that others reward.

    Besides the session's own key these are the callers whose key an agent has, too: those without
    a key in the open mode, and a tenant's where such a call opened the session, or where the
    operator's judge alone rewards.
    """
    if row.rewarded_by == "agent":
        return False
    if row.rewarded_by == "operator" and caller.scope is Scope.JUDGE:
        return True  # of an earlier session under the same key
    own = caller.scope is Scope.SESSION or caller is ANYONE
    tenants = row.implicit or row.rewarded_by == "operator"
    return own or (tenants and caller.scope is Scope.TENANT)


def author(row: SessionRow, caller: Caller, *, gives: bool) -> str:
    """Return the name under which a caller's rewards and words are recorded.

    Forbidden if it gives some where only others may: a grader reads the words.
    """
    if not is_agent(row, caller):
        return caller.name
    if row.rewarded_by != "both" and gives:
        raise judge_only(row, "reward")
    return _AGENT if caller.scope is Scope.SESSION else f"{_AGENT}: {caller.name}"


def require_judge(row: SessionRow, caller: Caller, action: str) -> None:
    """Raise Forbidden if a session's own key may not do this, as it would evade its judge."""
    if caller.scope is Scope.SESSION and is_agent(row, caller):
        raise judge_only(row, action)


def judge_only(row: SessionRow, action: str) -> Forbidden:
    """Return the error for what a session's agent may not do."""
    theirs = "the judge_key that start_session returned, or the key of its tenant or an admin"
    key = "an admin's key" if row.rewarded_by == "operator" else theirs
    return Forbidden(
        f"only its judge may {action} session {row.id} (rewards: {public_rewards(row)}): "
        f"send {key}",
        code=JUDGE_ONLY,
    )


def _by_agent(by: str) -> bool:
    return by == _AGENT or by.startswith(f"{_AGENT}: ")


def without_words(history: Iterable[RewardRow]) -> list[RewardRow]:
    """Return a history as the agent of a session that others reward may read it."""
    return [replace(given, text=None) for given in history if given.value is not None]


def named_rewards(row: SessionRow, history: Iterable[RewardRow]) -> dict[str, float]:
    """Return the sum of each named part over a session's rewards, from their whole history.

    The last value of a part counts; where both may reward, a judge's parts of a reward replace the
    agent's. A session's first names are kept, as many as one reward may have.
    """
    latest: dict[tuple[bool, str | None], dict[str | None, float]] = {}
    for given in history:
        if given.value is None:
            continue
        judged = row.rewarded_by == "both" and not _by_agent(given.by)
        latest.setdefault((judged, given.interaction_id), {})[given.name] = given.value
    sums: dict[str, float] = {}
    for (judged, about), parts in latest.items():
        if judged or (True, about) not in latest:
            for name, value in parts.items():
                if name is not None and (name in sums or len(sums) < _MAX_NAMES):
                    sums[name] = sums.get(name, 0.0) + value
    return sums


def require_room(given: int) -> None:
    """Raise Unprocessable if a session has no room for so many rewards."""
    if given > MAX_GIVEN:
        raise Unprocessable(
            f"the session would have {given} rewards, revisions included, and {MAX_GIVEN} is the "
            "most; it takes no more",
            code="too_many_rewards",
        )


class RewardBook:
    """Rewards of one rank's sessions."""

    def __init__(self, sessions: SessionStore) -> None:
        self._sessions = sessions
        self._weights = sessions.config.reward_weights
        self.given: Counter[str] = Counter()
        """Number of rewards that were set, by their object: `completion` or `final`."""

    async def set_reward(
        self,
        session: RecordedSession,
        parts: Parts,
        wanted: str | None,
        *,
        by: str,
        text: str | None = None,
        keep: KeepAnswer = no_receipt,
    ) -> RewardSet:
        """Reward one interaction, by default the last delivered one; ``text``: a user's words.

        SessionClosed once the trainer has the session, NotFound, Unprocessable for a name that has
        no weight, or if there is nothing to reward yet.
        """
        async with session.lock:
            target(session.row, Event.REWARD)
            await self._sessions.load(session)
            interaction = _rewarded_interaction(session, wanted)
            statements, own = await self.combine(session, interaction, parts, by=by, text=text)
            answer = RewardSet(session_id=session.id, interaction_id=interaction.id, reward=own)
            await self._write(session, session.row, statements, keep(answer))
            interaction.reward = own
            return answer

    async def set_final_reward(
        self,
        session: RecordedSession,
        parts: Parts,
        *,
        by: str,
        text: str | None = None,
        keep: KeepAnswer = no_receipt,
    ) -> RewardSet:
        """Set or revise the final reward; errors as in :meth:`set_reward`."""
        async with session.lock:
            target(session.row, Event.REWARD)
            statements, final = await self.combine(session, None, parts, by=by, text=text)
            answer = RewardSet(session_id=session.id, interaction_id=None, reward=final)
            row = replace(session.row, final_reward=final)
            await self._write(session, row, statements, keep(answer))
            return answer

    async def matches_final(self, session: RecordedSession, parts: Parts) -> bool:
        """Return whether the final reward has these parts; call under the session's lock."""
        before = session.row.final_reward
        if before is None or not parts:
            return not parts
        known, _, _ = await self._parts(session, None)
        if not known:
            # Its history is archived.
            return combined(parts, self._weights) == before
        return all(known.get(name) == value for name, value in parts.items())

    def count_given(self, statements: Iterable[SetReward]) -> None:
        for statement in statements:
            if statement.value is not None:
                self.given["final" if statement.interaction_id is None else "completion"] += 1

    def kept_text(self, text: str | None, *, alone: bool) -> str | None:
        """Return a user's text if this run stores texts; Conflict if nothing else was given."""
        if self._sessions.config.store_content or text is None:
            return text
        if alone:
            raise Conflict(
                "this run stores no texts (sessions.store_content): send thumbs or a score",
                code="content_not_stored",
                param="text",
            )
        return None

    async def history(self, session: RecordedSession, *, texts: bool = True) -> SessionDetails:
        """Return the details of a session, with its last rewards, and their texts if wanted."""
        async with session.lock:
            await self._sessions.load(session)
            info = session.info()
            rewards = await self._sessions.journal.rewards(session.id, last=_MAX_SHOWN)
            _, given = await self._sessions.journal.reward_parts(session.id, None)
        if not texts:
            rewards = without_words(rewards)
        shown = [RewardEntry(**asdict(reward)) for reward in rewards]
        return SessionDetails(**info.model_dump(), reward_history=shown, rewards_given=given)

    async def _write(
        self,
        session: RecordedSession,
        row: SessionRow,
        rewards: list[SetReward],
        kept: Iterable[Statement],
    ) -> None:
        """Write rewards; a finalized session loses the reason that it was given none."""
        also = []
        rewarded = any(reward.value is not None for reward in rewards)
        if rewarded and row.state is SessionState.FINALIZED and row.reason is not None:
            row = replace(row, reason=None)
            also = [set_state(row)]
        await self._sessions.write(session, row, *rewards, *also, *kept)
        session.touch()
        self.count_given(rewards)

    async def combine(
        self,
        session: RecordedSession,
        interaction: Interaction | None,
        parts: Parts,
        *,
        by: str,
        text: str | None = None,
    ) -> tuple[list[SetReward], float | None]:
        """Return the statements that add parts and a text to a reward (None: the final one), and
        the new sum; a text without parts leaves it as it is.

        Call under the session's lock. Errors as in :meth:`set_reward`.
        """
        self._require_known(parts)
        if text is not None:
            await self._require_room(session, by)
        interaction_id = interaction.id if interaction is not None else None
        before = interaction.reward if interaction is not None else session.row.final_reward
        known: dict[str | None, float] = {}
        if before is not None:
            known, given, judged = await self._parts(session, interaction_id, by)
            if session.row.rewarded_by == "both":
                if judged and _by_agent(by):
                    raise judge_only(session.row, "revise its own rewards of")
                if parts and not judged and not _by_agent(by):
                    known, before = {}, None
            require_room(given + 1)
            if before is not None:
                # A reward from before histories were kept.
                known = known or {None: before}
        at = time.time()
        if not parts:
            words = SetReward(session.id, interaction_id, FEEDBACK, None, by, at, None, text)
            return [words], before
        known |= parts
        if len(known) > _MAX_NAMES:
            raise Unprocessable(
                f"a reward may have at most {_MAX_NAMES} names", code="too_many_reward_names"
            )
        total = combined(known, self._weights)
        return [
            SetReward(session.id, interaction_id, name, value, by, at, total, text)
            for name, value in parts.items()
        ], total

    async def _require_room(self, session: RecordedSession, by: str) -> None:
        """Raise Unprocessable if the session has as many texts as it may have.

        An agent's count apart, so that it cannot use up its judge's.
        """
        history = await self._sessions.journal.rewards(session.id)
        texts = [one for one in history if one.text is not None]
        if sum(_by_agent(one.by) == _by_agent(by) for one in texts) >= MAX_TEXTS:
            raise Unprocessable(
                f"the session was given {MAX_TEXTS} texts; it takes thumbs and scores alone",
                code="too_many_feedback_texts",
                param="text",
            )

    async def _parts(
        self, session: RecordedSession, interaction_id: str | None, by: str | None = None
    ) -> tuple[dict[str | None, float], int, bool]:
        """Return the parts of a reward that count, the number of the session's rewards, and, where
        both may reward, whether the parts are a judge's, which replace the agent's.

        Where both may reward, a judge's rewards are counted alone, so that an agent cannot use up
        the judge's.
        """
        journal = self._sessions.journal
        known, given = await journal.reward_parts(session.id, interaction_id)
        if session.row.rewarded_by != "both":
            return known, given, False
        rewards = [r for r in await journal.rewards(session.id) if r.value is not None]
        judged = [r for r in rewards if not _by_agent(r.by)]
        judges = {
            r.name: r.value
            for r in judged
            if r.value is not None and r.interaction_id == interaction_id
        }
        if by is not None and not _by_agent(by):
            given = len(judged)
        return judges or known, given, bool(judges)

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


def _rewarded_interaction(session: RecordedSession, wanted: str | None) -> Interaction:
    tree = session.tree
    if wanted is not None and wanted not in tree:
        # The first choice may still be sampled, or have failed.
        if any(completion_of(i.id) == wanted for i in tree):
            raise _choice_needed(wanted)
        raise NotFound(
            f"session {session.id} has no completion {wanted[:80]!r}; check completion_id",
            code="completion_not_found",
        )
    if len(tree) == 0:
        raise Unprocessable(
            "the session has no completion to reward yet; make a call first", code="no_interactions"
        )
    if wanted is not None:
        return tree[wanted]
    last = last_received(session) or tree.last()
    if (completion := completion_of(last.id)) is not None:
        raise _choice_needed(completion)
    return last


def _choice_needed(completion: str) -> InvalidRequest:
    """Return the error for a call with several choices, each of which is its own interaction."""
    return InvalidRequest(
        f"completion {completion} has several choices, each with a reward of its own: name one by "
        f"its index, as completion_id {completion}.0",
        param="completion_id",
        code="choice_needed",
    )
