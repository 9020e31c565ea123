"""The open sessions that model calls opened, by tenant and task, and the answers that each gave."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from any_agent.chat import chain_keys, reasoning_of
from any_agent.record import RequestPrefix, was_received
from any_agent.record.request_prefix_cache import RequestPrefixCache
from any_agent.types import Interaction, Message, SessionState
from proxy_ext.sessions.session import RecordedSession

Where: TypeAlias = tuple[str | None, str]
"""A tenant (None: where no key is needed) and its task."""

_MESSAGES = 16
"""Bytes of a key that stand for the messages."""
_MAX_OVER = 16_384
"""Answers of ended sessions that are still known."""
_MAX_ANSWERS = 512
"""Of one session, the newest: nobody goes back further."""


@dataclass(slots=True, eq=False)
class RecordedAnswer:
    """What one interaction said, and how often it was gone on from."""

    member: ConversationMember
    id: str
    key: bytes
    """The chain key of its messages, itself and the tools."""
    thought: bytes
    """A digest of its reasoning."""
    continued: int = 0
    heard: bool = True
    """Unless it is known that it reached nobody."""


@dataclass(frozen=True, slots=True)
class ConversationQuery:
    """What was found out about a call's messages."""

    keys: list[tuple[bytes, int]]
    """Where an answer may end: the chain key, and how many messages that covers."""
    last: bytes
    digest: bytes | None


@dataclass(slots=True, eq=False)
class ConversationMember:
    """One session; ``number``: in the order of their opening."""

    session: RecordedSession
    number: int
    read: bool
    """Whether ``answers`` has what it recorded; what an earlier process did is still to be read."""
    answers: deque[RecordedAnswer] = field(default_factory=deque)
    recorded: bool = False
    """Whether anything was, be it cut off."""
    taken: int = 0
    """Calls that chose it and have not begun yet."""
    ending: bool = False

    @property
    def usable(self) -> bool:
        """Whether it takes calls, and goes on doing so."""
        s = self.session
        return s.state is SessionState.OPEN and not (s.closing or self.ending)


@dataclass(frozen=True, slots=True)
class ConversationMatch:
    """The answer that a call goes on from."""

    answer: RecordedAnswer
    ambiguous: bool
    """Whether another session's would have done as well."""


class ImplicitTask:
    """The open sessions of one tenant's task, oldest first."""

    def __init__(self) -> None:
        self.members: dict[str, ConversationMember] = {}
        self._answers: dict[bytes, list[RecordedAnswer]] = {}
        self._seen = RequestPrefixCache()

    def look(self, messages: Sequence[Message], tools: Any, template: bytes) -> ConversationQuery:
        """Hash the messages, but for those that an earlier call began with. In any thread."""
        begun, digest = self._seen.look(messages, [tools, template.hex()])
        known = begun.messages if begun is not None else 0
        keys = chain_keys(
            messages[known:],
            tools,
            start=begun.key if begun is not None else None,
            before=messages[:known],
            template=template,
        )
        at = [(key, known + k + 1) for k, key in enumerate(keys)]
        if begun is not None and begun.parent is not None:
            at.insert(0, begun.parent)
        return ConversationQuery(at, keys[-1] if keys or begun is None else begun.key, digest)

    def find(
        self, look: ConversationQuery, messages: Sequence[Message], over: Container[bytes] = ()
    ) -> ConversationMatch | None:
        """The answer with the longest conversation that the messages go on from.

        Of several the one that was continued least often, then the oldest session's. None if the
        longest is of a session that is ``over``: another one that said less is not this one.
        """
        for key, covered in reversed(look.keys):
            if covered == len(messages):
                # What ends with an answer adds nothing to it: it goes on from an earlier one.
                continue
            match = self._best(key, messages[covered - 1])
            if match is None and (key[:_MESSAGES] in over or key[:_MESSAGES] in self._answers):
                return None
            if match is not None:
                if look.digest is not None:
                    parent = key, covered
                    noted = RequestPrefix(len(messages), look.last, 0, 0, parent, frozenset())
                    self._seen.note(look.digest, noted)
                return match
        return None

    def _best(self, key: bytes, said: Message) -> ConversationMatch | None:
        found = [a for a in self._answers.get(key[:_MESSAGES], ()) if a.member.usable]
        if len(found) > 1:
            # Tools may change in a conversation, and many agents drop what was thought.
            found = [a for a in found if a.key == key] or found
            if thought := reasoning_of(said):
                digest = _digest(thought)
                found = [a for a in found if a.thought == digest] or found
        if not found:
            return None
        found = [a for a in found if a.heard] or found
        best = min(found, key=lambda a: (a.continued, a.member.number))
        others = {a.member for a in found if a.continued == best.continued}
        return ConversationMatch(best, ambiguous=len(others) > 1)

    def unused(self, metadata: Mapping[str, Any]) -> ConversationMember | None:
        """The oldest session in which nothing was said and nothing is under way: its first call
        failed, or was never begun."""
        for member in self.members.values():
            idle = not (member.taken or member.recorded or member.session.calls)
            if idle and member.usable and member.read and member.session.row.metadata == metadata:
                return member
        return None

    def recorded(
        self, member: ConversationMember, interaction: Interaction, key: bytes | None
    ) -> None:
        member.recorded = True
        if key is None or interaction.finish_reason == "abort":
            # What was cut off is not what an agent holds.
            return
        thought = reasoning_of(interaction.output_message)
        answer = RecordedAnswer(member, interaction.id, key, _digest(thought) if thought else b"")
        answer.heard = was_received(interaction)
        member.answers.append(answer)
        self._answers.setdefault(key[:_MESSAGES], []).append(answer)
        if len(member.answers) > _MAX_ANSWERS:
            self._forget(member.answers.popleft())

    def read(self, member: ConversationMember) -> None:
        """Take over what its tree holds, which is loaded."""
        if member.read:
            return
        member.read = True
        tree = member.session.tree
        for interaction in tree:
            self.recorded(member, interaction, tree.key(interaction.id))
        for answer in member.answers:
            answer.continued = len(tree.children(answer.id))

    def drop(self, member: ConversationMember) -> None:
        for answer in member.answers:
            self._forget(answer)
        member.answers.clear()

    def _forget(self, answer: RecordedAnswer) -> None:
        same = self._answers[answer.key[:_MESSAGES]]
        same.remove(answer)
        if not same:
            del self._answers[answer.key[:_MESSAGES]]


class ConversationIndex:
    """Of one rank. It holds open sessions, so it is as bounded as they are, and the latest answers
    of those that are over."""

    def __init__(self) -> None:
        self.over: dict[bytes, None] = {}
        """The messages' keys of ended sessions' answers, the oldest first."""
        self._tasks: dict[Where, ImplicitTask] = {}
        self._members: dict[str, tuple[Where, ConversationMember]] = {}
        self._next = 0

    def __len__(self) -> int:
        """Open sessions."""
        return len(self._members)

    def task(self, where: Where) -> ImplicitTask | None:
        return self._tasks.get(where)

    def member(self, session: RecordedSession) -> ConversationMember | None:
        found = self._members.get(session.id)
        return found[1] if found is not None else None

    def members(self, where: Where) -> list[ConversationMember]:
        """Oldest first."""
        task = self._tasks.get(where)
        return list(task.members.values()) if task is not None else []

    def add(self, session: RecordedSession, *, new: bool) -> None:
        """An open session, if a model call opened it. A ``new`` one belongs to that call."""
        row = session.row
        if not row.implicit or row.task_id is None or row.state is not SessionState.OPEN:
            return
        where = (row.tenant, row.task_id)
        member = ConversationMember(session, self._next, read=new, taken=int(new))
        self._next += 1
        self._tasks.setdefault(where, ImplicitTask()).members[session.id] = member
        self._members[session.id] = (where, member)

    def recorded(self, session: RecordedSession, interaction: Interaction, key: bytes) -> None:
        """It has one more interaction."""
        found = self._members.get(session.id)
        # Of one that was not read yet it is in the tree when that is.
        if found is not None and found[1].read:
            self._tasks[found[0]].recorded(found[1], interaction, key)

    def unheard(self, session: RecordedSession, interaction_id: str) -> None:
        """An answer reached nobody."""
        if (answer := self.answer(session, interaction_id)) is not None:
            answer.heard = False

    def answer(self, session: RecordedSession, interaction_id: str) -> RecordedAnswer | None:
        """One answer of a session that is here."""
        member = self.member(session)
        answers = member.answers if member is not None else ()
        return next((a for a in reversed(answers) if a.id == interaction_id), None)

    def changed(self, sessions: Iterable[RecordedSession]) -> None:
        """Their states may be others."""
        for session in sessions:
            if session.state is not SessionState.OPEN and session.id in self._members:
                where, member = self._members.pop(session.id)
                task = self._tasks[where]
                if session.warm:
                    # Nobody asked for it since a restart. It was loaded to be ended.
                    task.read(member)
                self._note_over(member)
                task.drop(member)
                del task.members[session.id]
                if not task.members:
                    del self._tasks[where]

    def _note_over(self, member: ConversationMember) -> None:
        for answer in member.answers:
            self.over.pop(answer.key[:_MESSAGES], None)
            self.over[answer.key[:_MESSAGES]] = None
        for key in list(islice(self.over, max(0, len(self.over) - _MAX_OVER))):
            del self.over[key]

    @contextmanager
    def ending(self, session: RecordedSession) -> Iterator[None]:
        """No call goes on with it meanwhile: it is about to be ended."""
        member = self.member(session)
        if member is None:
            yield
            return
        member.ending = True
        try:
            yield
        finally:
            member.ending = False


def _digest(thought: str) -> bytes:
    return hashlib.blake2b(thought.strip().encode("utf-8", "replace"), digest_size=8).digest()
