"""The session of a call that names none: the one whose conversation it continues, or a new one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError
from starlette.requests import Request

from any_agent.auth.access import ANYONE, Caller, Scope
from any_agent.completions.apis import Api
from any_agent.completions.call_types import Prepared
from any_agent.completions.completer import Completer
from any_agent.completions.params.call import ChatCall
from any_agent.completions.prepare import LONG_TEXT, prepare, with_request_parameter
from any_agent.completions.prompt import characters_of
from any_agent.errors import (
    InvalidRequest,
    NotFound,
    SessionClosed,
    SessionDamaged,
    TooManyRequests,
)
from any_agent.protocol.conversation_key import task_of
from any_agent.protocol.rl import StartSession
from any_agent.record import InteractionTree
from any_agent.types import SessionMode
from proxy_ext.admission.fleet_place import choice_of
from proxy_ext.admission.open_session import SessionOpener
from proxy_ext.calls.call import Listener
from proxy_ext.calls.concurrency_limit import CallSlot
from proxy_ext.calls.retries import find_retried_session, retry_mark
from proxy_ext.sessions.conversation_index import (
    ConversationMatch,
    ConversationMember,
    RecordedAnswer,
    TaskKey,
)
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore
from proxy_ext.web.exchange import while_present

JoinKind: TypeAlias = Literal["opened", "continued", "ambiguous", "retried", "reused"]
"""The way in which a call got its session: ambiguous means continued where another session had the
same answer, reused means a session without any answer."""


@dataclass(slots=True, eq=False)
class JoinedSession:
    """A call's session, reserved for the call until it has started."""

    member: ConversationMember
    answer: RecordedAnswer | None = None
    """The answer that it continues: another call with the same conversation takes another one."""
    prepared: Prepared | None = None
    """The rendered call, if its session is new."""

    @property
    def session(self) -> RecordedSession:
        return self.member.session

    def on_started(self, listener: Listener) -> None:
        """End the reservation: the call has started, or an earlier one was joined."""
        self.member.joining -= 1
        call, answer = listener.call, self.answer
        if answer is None or call.task is None:
            return

        def on_done(_: object) -> None:
            if call.failed and not call.recorded:
                answer.continued -= 1

        call.task.add_done_callback(on_done)

    def cancel(self) -> None:
        """End the reservation of a call that will not start."""
        self.member.joining -= 1
        if self.answer is not None:
            self.answer.continued -= 1


class ImplicitSessions:
    """Finds and opens the sessions of calls that name none, at one rank."""

    def __init__(
        self, sessions: SessionStore, opening: SessionOpener, completer: Completer
    ) -> None:
        self._sessions = sessions
        self._opening = opening
        self._completer = completer
        self._config = sessions.config
        self.calls: Counter[str] = Counter()
        """Number of calls by how they got their session (:data:`JoinKind`)."""

    def accepts(self, caller: Caller) -> bool:
        """Return whether this caller's calls may come without a session."""
        return self._config.implicit and (caller.scope is Scope.TENANT or caller is ANYONE)

    async def join(
        self,
        request: Request,
        api: Api,
        body: Mapping[str, Any],
        call: ChatCall,
        caller: Caller,
        slot: CallSlot,
        mode: SessionMode,
    ) -> JoinedSession:
        """Return the session of a checked call, a new one of this ``mode``.

        Each answer is continued by one call at a time. TooManyRequests if a new session gets no
        slot in time; the call slot is lent to other calls meanwhile.
        """
        if call.prompts:
            raise InvalidRequest(
                "a legacy completion has no messages that identify its conversation, so it needs a "
                "session: POST /rl/v1/start_session and use its api_key, or send "
                "messages to /v1/chat/completions",
                code="no_conversation",
            )
        if len(call.messages) > self._completer.context_length:
            # Raises before anything is hashed.
            self._completer.find(call, None)
        long = len(await request.body()) > LONG_TEXT
        conversation = api.conversation(body)
        task = await asyncio.to_thread(task_of, conversation) if long else task_of(conversation)
        where = (caller.tenant, task)
        await self._load_answers(where)
        repeated = await self._repeated(request, where)
        if repeated is not None:
            return self._reserve("retried", repeated)
        # References to tools make the messages longer than the body.
        long = long or characters_of(call.messages) > LONG_TEXT
        if match := await self._match(where, call, long=long):
            kind: JoinKind = "ambiguous" if match.ambiguous else "continued"
            return self._reserve(kind, match.answer.member, match.answer)
        start = self._start(body, task, mode)
        others = self._sessions.conversations.task(where)
        if others is not None and (unused := others.find_unused(start.metadata, mode)) is not None:
            return self._reserve("reused", unused)
        return await self._open(request, start, call, caller, slot)

    async def session_of(self, caller: Caller, interaction_id: str) -> RecordedSession:
        """Return the caller's session, ended or not, that gave an answer; NotFound."""
        id = await self._sessions.journal.session_of_interaction(interaction_id)
        if id is not None:
            session = await self._sessions.by_id(id)
            if session.row.implicit and session.row.tenant == caller.tenant:
                return session
        raise NotFound(
            f"no session of yours on this rank gave the answer {interaction_id[:80]!a}",
            code="response_not_found",
            param="response_id",
        )

    async def join_named(self, caller: Caller, response_id: str) -> JoinedSession | None:
        """Return the caller's open session that gave an earlier response; None without one."""
        try:
            session = await self.session_of(caller, response_id)
        except NotFound:
            return None
        await self._load_answers((session.row.tenant, session.row.task_id or ""))
        member = self._sessions.conversations.member(session)
        if member is None or not member.usable:
            return None
        answer = self._sessions.conversations.answer(session, response_id)
        return self._reserve("continued", member, answer)

    # ------------------------------------------------------------------------------------------

    def _reserve(
        self, kind: JoinKind, member: ConversationMember, answer: RecordedAnswer | None = None
    ) -> JoinedSession:
        self.calls[kind] += 1
        member.joining += 1
        # Renew its idle time, so that it does not expire before the call has started.
        member.session.touch()
        if answer is not None:
            answer.continued += 1
        return JoinedSession(member, answer)

    async def _load_answers(self, where: TaskKey) -> None:
        """Index the answers of the task's sessions that an earlier process recorded."""
        for member in self._sessions.conversations.members(where):
            if member.loaded:
                continue
            try:
                await self._sessions.load(member.session)
            except SessionDamaged:
                # The session is being ended.
                continue
            task = self._sessions.conversations.task(where)
            if task is not None and member.session.id in task.members:
                task.load(member)

    async def _repeated(self, request: Request, where: TaskKey) -> ConversationMember | None:
        mark = retry_mark(request, await request.body())
        if mark is None or mark.retry_count == 0:
            return None

        def usable() -> list[RecordedSession]:
            members = self._sessions.conversations.members(where)
            return [member.session for member in members if member.usable]

        session = await find_retried_session(usable, mark)
        return self._sessions.conversations.member(session) if session is not None else None

    async def _match(
        self, where: TaskKey, call: ChatCall, *, long: bool
    ) -> ConversationMatch | None:
        task = self._sessions.conversations.task(where)
        if task is None:
            return None
        chat = self._completer.format_of(call)
        if long:
            query = await asyncio.to_thread(task.hash_messages, call.messages, call.tools, chat)
        else:
            query = task.hash_messages(call.messages, call.tools, chat)
        return task.find(query, call.messages, self._sessions.conversations.ended_keys)

    def _start(self, body: Any, task_id: str, mode: SessionMode) -> StartSession:
        metadata = body.get("metadata") if isinstance(body, Mapping) else None
        try:
            return StartSession(
                task_id=task_id,
                mode=mode.value,
                group_size=self._config.implicit_group_size,
                metadata=metadata if isinstance(metadata, dict) else {},
                wait=self._config.implicit_wait,
                ttl=None,
            )
        except ValidationError as error:
            message = error.errors(include_input=False, include_url=False)[0]["msg"]
            raise InvalidRequest(message.removeprefix("Value error, "), param="metadata") from None

    async def _open(
        self, request: Request, start: StartSession, call: ChatCall, caller: Caller, slot: CallSlot
    ) -> JoinedSession:
        # A call that cannot be rendered, or is too long, must take no session slot.
        try:
            prepared = await prepare(self._completer, call, InteractionTree())
        except InvalidRequest as error:
            raise with_request_parameter(error, call) from None
        member: ConversationMember | None = None
        try:
            with slot.lent():
                opening = self._opening.open(
                    start, caller, implicit=True, choice=choice_of(request)
                )
                started = await while_present(request, opening)
                session = self._sessions.live.get(started.session_id)
                member = (
                    self._sessions.conversations.member(session) if session is not None else None
                )
        except TooManyRequests:
            if member is not None:
                # The session is open, but no call slot is free: a repeated call finds the session.
                member.joining -= 1
            raise
        if member is None:
            raise SessionClosed(
                f"session {started.session_id} was ended before its first call", retry_after=1
            )
        self.calls["opened"] += 1
        # It was reserved for this call when it was opened.
        return JoinedSession(member, prepared=prepared)
