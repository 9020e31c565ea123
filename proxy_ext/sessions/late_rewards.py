"""Sessions whose awaited reward did not come in time: what `sessions.late_reward` makes of them.

None of them ends without a word: its reason, or who gave its reward, says what happened.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any, Literal, TypeAlias

from any_agent.config import SessionConfig
from any_agent.errors import AnyAgentError, SessionClosed, Unprocessable
from proxy_ext.sessions.endings import SessionEnder, is_rewarded
from proxy_ext.sessions.grading import Grader, GraderFailed, graded_session
from proxy_ext.sessions.session import RecordedSession
from proxy_ext.sessions.session_store import SessionStore

log = logging.getLogger(__name__)

Outcome: TypeAlias = Literal["rewarded", "rejected", "zero", "graded", "grader_failed"]
NO_REWARD = "no reward came by its deadline"


class LateRewardWaiter:
    """Ends the sessions of one rank that awaited a reward until their deadline."""

    def __init__(
        self,
        sessions: SessionStore,
        endings: SessionEnder,
        config: SessionConfig,
        grader: Grader | None,
    ) -> None:
        self._sessions = sessions
        self._endings = endings
        self._policy = config.late_reward
        self._grader = grader
        self._grading: dict[str, asyncio.Task[None]] = {}
        self.outcomes: Counter[str] = Counter()
        """What became of sessions at their deadline."""

    @property
    def grading(self) -> int:
        """Sessions that are being graded, or wait for it."""
        return len(self._grading)

    async def end(self, session: RecordedSession) -> None:
        """Its deadline has passed. SessionClosed if it has ended otherwise."""
        await self._sessions.load(session)
        graded = self._grader is not None and (self._policy == "grade" or session.row.implicit)
        if graded and not is_rewarded(session):
            self._begin_grading(session)
        elif self._policy == "zero":
            await self._end(session, "zero", final={None: 0.0}, by="sessions.late_reward=zero")
        else:
            await self._end(session, "rejected", reason=NO_REWARD)

    def _begin_grading(self, session: RecordedSession) -> None:
        if session.id not in self._grading:
            task = asyncio.create_task(self._grade(session))
            self._grading[session.id] = task
            task.add_done_callback(lambda _: self._grading.pop(session.id, None))

    async def close(self) -> None:
        """Stop grading; what is not graded yet is graded after the next start."""
        for task in self._grading.values():
            task.cancel()
        if self._grading:
            await asyncio.wait(self._grading.values(), timeout=10)
        if self._grader is not None:
            await self._grader.close()

    async def _grade(self, session: RecordedSession) -> None:
        try:
            await self._end_graded(session)
        except SessionClosed:
            log.debug("session %s ended while it was graded", session.id)
        except AnyAgentError as error:
            log.warning("could not end session %s yet: %s", session.id, error.message)
            # The next sweep grades it again.
            self._sessions.watch(session)
        except Exception:
            log.exception("could not end session %s yet", session.id)
            self._sessions.watch(session)

    async def _end_graded(self, session: RecordedSession) -> None:
        assert self._grader is not None, "the configuration asks for one"
        try:
            async with self._grader.free:
                await self._sessions.load(session)
                final = await self._grader.grade(graded_session(session))
            await self._end(session, "graded", final=final, by=f"grader {self._grader.name}")
        except (GraderFailed, Unprocessable) as error:
            # Also of names that have no weight.
            log.warning("session %s could not be graded: %s", session.id, error)
            await self._end(session, "grader_failed", reason=f"grader failed: {error}")

    async def _end(self, session: RecordedSession, outcome: Outcome, **ending: Any) -> None:
        """What came in the meantime counts for more."""
        if await self._endings.at_deadline(session, **ending):
            outcome = "rewarded"
        self.outcomes[outcome] += 1
        log.info("session %s has awaited its reward until its deadline: %s", session.id, outcome)
