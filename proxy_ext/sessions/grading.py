"""Rewards by the operator's function (`sessions.grader`), which runs in worker processes.

A grader may hang, crash or use up its memory: it runs in a worker that is killed after
`sessions.grader_timeout`, and every failure of it is a :class:`GraderFailed`. Workers are started
when they are first needed, and end with this process.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from any_agent.chat.conversation_hash import canonical_bytes, chain_keys, key_parts
from any_agent.config import SECRET_VARIABLES, SessionConfig
from any_agent.errors import ConfigError, Conflict
from any_agent.protocol.rl import FeedbackContent, as_reward
from any_agent.record import InteractionTree
from any_agent.rewards import grader as grading
from any_agent.rewards.grader import short
from any_agent.runtime.worker_pool import WorkerCrashed, WorkerFailed, WorkerPool, WorkerTimeout
from any_agent.types import Interaction, Message
from proxy_ext.sessions.rewards import FEEDBACK, NO_PARTS, Parts, parts_of, without_words
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore

_WORKERS = 2
_REPLIERS = ("user", "tool", "function")


class GraderFailed(Exception):
    """The grader gave no reward; the message has the reason."""


async def graded_session(
    sessions: SessionStore, session: RecordedSession, *, deltas: bool = False, texts: bool = True
) -> dict[str, Any]:
    """Return a session as graders get it, see :func:`graded`; users' words only if wanted."""
    row = session.row
    history = await sessions.journal.rewards(row.id)
    rewards = [asdict(one) for one in (history if texts else without_words(history))]
    await sessions.load(session)
    # In a thread, and of its own: an open session may get more calls meanwhile.
    tree = InteractionTree.from_interactions(session.tree)
    about = {name: getattr(row, name) for name in ("id", "mode", "task_id", "metadata")}
    return await asyncio.to_thread(graded, about, tree, rewards, deltas=deltas)


def graded(
    about: Mapping[str, Any],
    tree: InteractionTree,
    rewards: Iterable[Mapping[str, Any]],
    *,
    deltas: bool = False,
) -> dict[str, Any]:
    """Return a session as graders get it: a dict of plain values.

    Each interaction has its answer, ``output_message``, what users and tools said to it,
    ``next_messages``, and its conversation, ``messages``; with ``deltas`` only the messages that it
    adds to its parent, ``message_delta``. ``about`` has the
    session's id, mode, task_id and metadata; ``rewards`` are all of its history, of which
    ``feedback`` has the users'.
    """

    said = _next_messages(tree)

    def messages(i: Interaction) -> dict[str, Any]:
        return {"message_delta": i.message_delta} if deltas else {"messages": tree.messages(i.id)}

    return {
        "session_id": about["id"],
        "mode": str(about["mode"]),
        "task_id": about["task_id"],
        "metadata": about["metadata"],
        "feedback": [
            {name: one.get(name) for name in FeedbackContent.model_fields}
            for one in rewards
            if one["name"] == FEEDBACK
        ],
        "interactions": [
            {
                "id": i.id,
                "parent_id": i.parent_id,
                **messages(i),
                "output_message": i.output_message,
                "finish_reason": i.finish_reason,
                "next_messages": said.get(i.id, []),
            }
            for i in tree
        ],
    }


def _next_messages(tree: InteractionTree) -> dict[str, list[list[Message]]]:
    """Return what users and tools said to each answer before the next one, by the answer's id.

    Several continuations with the same messages, such as the choices of one call, count once. A
    branch continues the answer before its new messages, though its tokens do not: also under
    another system prompt or with other tools, if its role has one answer alone after the same
    messages.
    """
    keys: dict[str, bytes] = {}
    latest: dict[bytes, str] = {}
    by_messages: dict[tuple[str, bytes], str | None] = {}
    said: defaultdict[str, dict[bytes, list[Message]]] = defaultdict(dict)
    for call in tree:
        before, added = call.parent_id, call.message_delta
        if before is not None:
            start, past = keys[before], [tree[before].output_message]
            own = chain_keys([*added, call.output_message], None, start=start, before=past)
        else:
            own = chain_keys([*added, call.output_message], None)
            for end in range(len(added), 0, -1):
                key = own[end - 1]
                alike = (call.role, key_parts(key)[0])
                if key in latest or alike in by_messages:
                    before = latest.get(key) or by_messages[alike]
                    added = added[end:]
                    break
        keys[call.id] = own[-1]
        latest[own[-1]] = call.id
        alike = (call.role, key_parts(own[-1])[0])
        by_messages[alike] = None if alike in by_messages else call.id
        answers = takewhile(lambda message: message.get("role") != "assistant", added)
        new = [message for message in answers if message.get("role") in _REPLIERS]
        if before is not None and new:
            said[before].setdefault(canonical_bytes(new), new)
    return {id: [*each.values()] for id, each in said.items()}


async def content_of(
    sessions: SessionStore, session: RecordedSession, *, texts: bool = True
) -> bytes:
    """Return :class:`any_agent.protocol.rl.SessionContent` as JSON, for graders elsewhere; users'
    words only if wanted.

    It has deltas: with whole conversations a long session would come to many times its size.
    Conflict if the content is not stored here.
    """
    row = session.row
    if row.content != "stored":
        raise Conflict(
            f"the content of session {row.id} is {row.content}, so it cannot be read here; "
            "`any-agent export` reads archived sessions",
            code="content_not_stored",
        )
    if not sessions.config.store_content:
        raise Conflict(
            "this run stores no texts (sessions.store_content), so there is nothing to grade",
            code="content_not_stored",
        )
    content = await graded_session(sessions, session, deltas=True, texts=texts)
    return await asyncio.to_thread(orjson.dumps, content)


class Grades(NamedTuple):
    """The rewards of a grader: the session's final one, or those of calls; both may be missing."""

    final: Parts = NO_PARTS
    calls: Mapping[str, Parts] = MappingProxyType({})


def _grades_of(returned: Any) -> Grades:
    """Return a grader's result as rewards; ValueError for what is none."""
    if isinstance(returned, dict) and all(isinstance(one, dict) for one in returned.values()):
        return Grades(calls={id: parts_of(as_reward(one)) for id, one in returned.items()})
    return Grades(parts_of(as_reward(returned)))


class Grader:
    """Runs the grader ``name``, a "module.function" that may be a coroutine function.

    It takes the result of :func:`graded_session` and returns a number, or several by name; or, by
    the ids of calls, several by name for each.
    """

    def __init__(self, name: str, *, timeout: float, workers: int = _WORKERS) -> None:
        self.name = name
        self._timeout = timeout
        self.free = asyncio.Semaphore(workers)
        """Idle workers. A caller acquires one before it grades: so the time-out counts the grader's
        time alone, and a session is read only when its turn has come."""
        self._pool = WorkerPool(workers, secrets=SECRET_VARIABLES)

    async def check(self) -> None:
        """Raise GraderFailed if there is no such function, or if importing it takes too long."""
        await self._run(grading.find, self.name)

    async def grade(self, session: Mapping[str, Any]) -> Grades:
        """Return its rewards, or raise GraderFailed. The caller has acquired ``free``."""
        returned = await self._run(grading.grade, self.name, dict(session))
        try:
            grades = _grades_of(returned)
        except ValueError as error:
            raise GraderFailed(
                f"it returned {short(repr(returned))}, which is not a reward: {error}"
            ) from None
        known = {call["id"] for call in session.get("interactions", ())}
        if unknown := grades.calls.keys() - known:
            raise GraderFailed(f"it rewards {short(min(unknown))}, which is no call of the session")
        return grades

    async def close(self) -> None:
        """End the workers, also in the middle of a grade."""
        await asyncio.to_thread(self._pool.close)

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            worked, result = await self._pool.run(function, *arguments, timeout=self._timeout)
        except WorkerTimeout:
            raise GraderFailed(f"it took more than {self._timeout:g} s") from None
        except WorkerCrashed as error:
            raise GraderFailed(str(error)) from None
        except (WorkerFailed, ConfigError) as error:
            raise GraderFailed(f"it could not be run: {short(str(error))}") from error
        if not worked:
            raise GraderFailed(short(str(result)))
        return result


def grader_of(config: SessionConfig) -> Grader | None:
    """Return the grader of sessions without a reward; None if the settings name none."""
    if config.late_reward != "grade" and not config.implicit:
        return None
    return Grader(config.grader, timeout=config.grader_timeout)


async def check_grader(config: SessionConfig) -> None:
    """Raise ConfigError if the grader cannot be used."""
    grader = grader_of(config)
    if grader is None:
        return
    try:
        await grader.check()
    except GraderFailed as error:
        raise ConfigError(f"sessions.grader={grader.name} cannot be used: {error}") from None
    finally:
        await grader.close()
