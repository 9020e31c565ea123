"""An index of the open implicit sessions by tenant and task, and of the answers in each."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from any_agent.chat import ChatFormat, chain_keys, reasoning_of
from any_agent.record import RequestPrefix, was_received
from any_agent.record.request_prefix_cache import RequestPrefixCache
from any_agent.types import Interaction, Message, SessionMode, SessionState
from proxy_ext.sessions.session import RecordedSession

TaskKey: TypeAlias = tuple[str | None, str]
"""A tenant (None where no key is needed) and its task."""

_MESSAGE_BYTES = 16  # leading bytes of a chain key that depend on the messages alone
_MAX_ENDED_KEYS = 16_384  # answers of ended sessions that are still known
_MAX_ANSWERS = 512  # newest answers of one session: agents go back no further


@dataclass(slots=True, eq=False)
class RecordedAnswer:
    """The answer of one interaction, and how often it was continued."""

    member: ConversationMember
    id: str
    key: bytes
    """The chain key of its messages, itself and the tools."""
    reasoning: bytes
    """A digest of its reasoning; empty without one."""
    continued: int = 0
    delivered: bool = True
    """False if it is known to have reached no client."""


@dataclass(frozen=True, slots=True)
class ConversationQuery:
    """The chain keys of a call's messages."""

    keys: list[tuple[bytes, int]]
    """Possible ends of an answer: a chain key and the number of messages that it covers."""
    last: bytes
    digest: bytes | None


@dataclass(slots=True, eq=False)
class ConversationMember:
    """One session of a task; ``number`` grows in the order of opening."""

    session: RecordedSession
    task: TaskKey
    number: int
    loaded: bool
    """``answers`` has its recorded answers; those of an earlier process are loaded later."""
    answers: deque[RecordedAnswer] = field(default_factory=deque)
    recorded: bool = False
    """It recorded at least one answer, truncated ones included."""
    joining: int = 0
    """Number of calls that chose the session and have not started yet."""
    ending: bool = False

    @property
    def usable(self) -> bool:
        """True while the session takes calls and is not about to end."""
        s = self.session
        return s.state is SessionState.OPEN and not (s.closing or self.ending)


@dataclass(frozen=True, slots=True)
class ConversationMatch:
    """The answer that a call continues."""

    answer: RecordedAnswer
    ambiguous: bool
    """An answer of another session would have fitted as well."""


class ImplicitTask:
    """The open sessions of one tenant's task, oldest first."""

    def __init__(self) -> None:
        self.members: dict[str, ConversationMember] = {}
        self._answers: dict[bytes, list[RecordedAnswer]] = {}
        self._prefixes = RequestPrefixCache()

    def hash_messages(
        self, messages: Sequence[Message], tools: Any, chat: ChatFormat
    ) -> ConversationQuery:
        """Hash the messages except for a prefix that an earlier call had; thread-safe."""
        prefix, digest = self._prefixes.find(messages, [tools, chat.render_key.hex()])
        known = prefix.messages if prefix is not None else 0
        keys = chain_keys(
            messages[known:],
            tools,
            start=prefix.key if prefix is not None else None,
            before=messages[:known],
            template=chat.render_key,
            nameless=chat.nameless_roles,
        )
        at = [(key, known + k + 1) for k, key in enumerate(keys)]
        if prefix is not None and prefix.parent is not None:
            at.insert(0, prefix.parent)
        return ConversationQuery(at, keys[-1] if keys or prefix is None else prefix.key, digest)

    def find(
        self, query: ConversationQuery, messages: Sequence[Message], ended: Container[bytes] = ()
    ) -> ConversationMatch | None:
        """Return the answer with the longest conversation that the messages continue.

        Of several the one that was continued least often, then the oldest session's. None if the
        longest belongs to an ``ended`` session: a session with a shorter match is another one.
        """
        for key, covered in reversed(query.keys):
            if covered == len(messages):
                # Messages that end with an answer add nothing to it: they continue an earlier one.
                continue
            match = self._best(key, messages[covered - 1])
            if match is None and (
                key[:_MESSAGE_BYTES] in ended or key[:_MESSAGE_BYTES] in self._answers
            ):
                return None
            if match is not None:
                if query.digest is not None:
                    parent = key, covered
                    prefix = RequestPrefix(len(messages), query.last, 0, 0, parent, frozenset())
                    self._prefixes.note(query.digest, prefix)
                return match
        return None

    def _best(self, key: bytes, message: Message) -> ConversationMatch | None:
        found = [a for a in self._answers.get(key[:_MESSAGE_BYTES], ()) if a.member.usable]
        if len(found) > 1:
            # Tools may change in a conversation, and many agents drop the reasoning.
            found = [a for a in found if a.key == key] or found
            if reasoning := reasoning_of(message):
                digest = _digest(reasoning)
                found = [a for a in found if a.reasoning == digest] or found
        if not found:
            return None
        found = [a for a in found if a.delivered] or found
        best = min(found, key=lambda a: (a.continued, a.member.number))
        others = {a.member for a in found if a.continued == best.continued}
        return ConversationMatch(best, ambiguous=len(others) > 1)

    def find_unused(
        self, metadata: Mapping[str, Any], mode: SessionMode
    ) -> ConversationMember | None:
        """Return the oldest session of the mode whose first call failed or never started."""
        for member in self.members.values():
            idle = not (member.joining or member.recorded or member.session.calls)
            alike = (member.session.row.metadata, member.session.mode) == (metadata, mode)
            if idle and member.usable and member.loaded and alike:
                return member
        return None

    def add_answer(
        self, member: ConversationMember, interaction: Interaction, key: bytes | None
    ) -> None:
        """Index an interaction of a member; a truncated answer only marks it as recorded."""
        member.recorded = True
        if key is None or interaction.finish_reason == "abort":
            # A truncated answer is not what its agent has.
            return
        reasoning = reasoning_of(interaction.output_message)
        digest = _digest(reasoning) if reasoning else b""
        received = was_received(interaction)
        answer = RecordedAnswer(member, interaction.id, key, digest, delivered=received)
        member.answers.append(answer)
        self._answers.setdefault(key[:_MESSAGE_BYTES], []).append(answer)
        if len(member.answers) > _MAX_ANSWERS:
            self._forget(member.answers.popleft())

    def load(self, member: ConversationMember) -> None:
        """Index the answers of a member whose tree is loaded."""
        if member.loaded:
            return
        member.loaded = True
        tree = member.session.tree
        for interaction in tree:
            self.add_answer(member, interaction, tree.key(interaction.id))
        for answer in member.answers:
            answer.continued = len(tree.children(answer.id))

    def remove_answers(self, member: ConversationMember) -> None:
        for answer in member.answers:
            self._forget(answer)
        member.answers.clear()

    def _forget(self, answer: RecordedAnswer) -> None:
        same = self._answers[answer.key[:_MESSAGE_BYTES]]
        same.remove(answer)
        if not same:
            del self._answers[answer.key[:_MESSAGE_BYTES]]


class ConversationIndex:
    """The implicit sessions of one rank.

    It is bounded as the number of open sessions is, and has the latest answers of ended ones.
    """

    def __init__(self) -> None:
        self.ended_keys: dict[bytes, None] = {}
        """Message keys of ended sessions' answers, oldest first."""
        self._tasks: dict[TaskKey, ImplicitTask] = {}
        self._members: dict[str, ConversationMember] = {}
        self._next = 0

    def __len__(self) -> int:
        """Return the number of open implicit sessions."""
        return len(self._members)

    def task(self, where: TaskKey) -> ImplicitTask | None:
        return self._tasks.get(where)

    def member(self, session: RecordedSession) -> ConversationMember | None:
        return self._members.get(session.id)

    def members(self, where: TaskKey) -> list[ConversationMember]:
        """Return the sessions of a task, oldest first."""
        task = self._tasks.get(where)
        return list(task.members.values()) if task is not None else []

    def add(self, session: RecordedSession, *, new: bool) -> None:
        """Add an open session that a model call opened; a ``new`` one is for that call."""
        row = session.row
        if not row.implicit or row.task_id is None or row.state is not SessionState.OPEN:
            return
        where = (row.tenant, row.task_id)
        member = ConversationMember(session, where, self._next, loaded=new, joining=int(new))
        self._next += 1
        self._tasks.setdefault(where, ImplicitTask()).members[session.id] = member
        self._members[session.id] = member

    def add_answer(self, session: RecordedSession, interaction: Interaction, key: bytes) -> None:
        member = self.member(session)
        # A member that is not loaded yet finds it in the tree then.
        if member is not None and member.loaded:
            self._tasks[member.task].add_answer(member, interaction, key)

    def mark_undelivered(self, session: RecordedSession, interaction_id: str) -> None:
        if (answer := self.answer(session, interaction_id)) is not None:
            answer.delivered = False

    def answer(self, session: RecordedSession, interaction_id: str) -> RecordedAnswer | None:
        member = self.member(session)
        answers = member.answers if member is not None else ()
        return next((a for a in reversed(answers) if a.id == interaction_id), None)

    def refresh(self, sessions: Iterable[RecordedSession]) -> None:
        """Remove the sessions that are not open any more."""
        for session in sessions:
            if session.state is not SessionState.OPEN and session.id in self._members:
                member = self._members.pop(session.id)
                task = self._tasks[member.task]
                if session.loaded:
                    # A recovered session without calls since was loaded to be ended.
                    task.load(member)
                self._remember_keys(member)
                task.remove_answers(member)
                del task.members[session.id]
                if not task.members:
                    del self._tasks[member.task]

    def _remember_keys(self, member: ConversationMember) -> None:
        for answer in member.answers:
            self.ended_keys.pop(answer.key[:_MESSAGE_BYTES], None)
            self.ended_keys[answer.key[:_MESSAGE_BYTES]] = None
        for key in list(islice(self.ended_keys, max(0, len(self.ended_keys) - _MAX_ENDED_KEYS))):
            del self.ended_keys[key]

    @contextmanager
    def ending(self, session: RecordedSession) -> Iterator[None]:
        """Let no call join the session while it is being ended."""
        member = self.member(session)
        if member is None:
            yield
            return
        member.ending = True
        try:
            yield
        finally:
            member.ending = False


def _digest(reasoning: str) -> bytes:
    return hashlib.blake2b(reasoning.strip().encode("utf-8", "replace"), digest_size=8).digest()
