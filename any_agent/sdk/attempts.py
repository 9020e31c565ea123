"""One attempt at one run of the agent: a session from its opening to its end."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from any_agent.client.retry_transport import SharedClient
from any_agent.client.rl_client import RLClient
from any_agent.errors import AgentFailed, AnyAgentError, NotFound, SessionClosed, Unprocessable
from any_agent.protocol.rl import SessionInfo
from any_agent.rewards.returned import no_reward
from any_agent.runtime.event_loop import cancel_and_wait
from any_agent.sdk.agent_callable import AgentCallable
from any_agent.sdk.find_service import ServiceAddress
from any_agent.sdk.results import RunResult, RunState
from any_agent.sdk.results_log import ResultsLog
from any_agent.sdk.run_plan import RunId, RunPlan
from any_agent.sdk.session import AgentSession, AsyncSession

log = logging.getLogger(__name__)

MissingReward: TypeAlias = float | Literal["fail", "await"]
"""What becomes of a run that gave no reward: it gets this one, fails, or awaits its reward, which
somebody else gives then."""

_ABORTS_TIMEOUT = 5.0
_OVER: dict[str, RunState] = {
    "finalized": "finalized",
    "leased": "finalized",
    "trained": "finalized",
    # By the trainer, or with its group: the agent has done its part.
    "rejected": "finalized",
    "evaluated": "evaluated",
    "awaiting_reward": "awaiting_reward",
}
"""What states of a session mean for its run. The others: it is open, or it is lost."""
_FINAL = {"invalid_reward", "no_model_call", "no_reward"}
"""Failures that another attempt would only repeat."""


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """How each attempt is made."""

    service: ServiceAddress
    mode: Literal["train", "eval"]
    timeout: float
    missing_reward: MissingReward
    wait: float
    retry_for: float
    ttl: float | None
    version: int | Literal["current"] | None


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """``result`` is failed where the agent did; ``lost`` where the session ended by itself (it
    expired, somebody aborted it): then nothing is known of the agent."""

    result: RunResult
    again: bool = False
    """Whether another attempt may do better; its place in the group is kept for it."""
    lost: bool = False


class AttemptRunner:
    """Makes attempts. What the service refuses for all runs alike is raised."""

    def __init__(
        self,
        agent: AgentCallable,
        terms: AttemptLimits,
        plan: RunPlan,
        run_log: ResultsLog,
        client: RLClient,
        http: SharedClient | None,
    ) -> None:
        self._agent = agent
        self._client = client
        self._terms = terms
        self._plan = plan
        self._log = run_log
        self._http = http

    async def make(
        self,
        place: RunId,
        item: Any,
        *,
        attempt: int,
        task: str | None,
        group: tuple[str, int],
        last: bool,
    ) -> AttemptOutcome:
        """Open a session, run the agent in it, and end it.

        ``last``: if this fails, no other one takes its place in the group. Raises what
        :class:`AgentSession` raises where no session can be opened (Conflict `group_closed`: its
        group goes without it).
        """
        opening = self._opening(place, attempt, task, group)
        try:
            session = await opening.__aenter__()
        except asyncio.CancelledError:
            # If it was opened it was aborted.
            await self._log.void(place, attempt)
            raise
        began = time.monotonic()
        cut_off: BaseException | None = None
        try:
            await self._log.opened(place, attempt, session.session_id)
            try:
                info = await self._run(session, place, item, attempt)
                return AttemptOutcome(self._finished(place, info, attempt, began))
            except SessionClosed:
                return await self._closed(session, place, attempt, began)
            except _Failed as failed:
                return await self._failed(session, place, attempt, began, failed, last)
        except BaseException as error:
            cut_off = error
            await _abort_for_now(session, error)
            raise
        finally:
            session.detach()
            await opening.__aexit__(type(cut_off) if cut_off else None, cut_off, None)

    async def look(self, place: RunId, session_id: str, attempt: int) -> RunResult | None:
        """What has become of an attempt that a runner before this one began.

        None: it is to be made again. If it was open it is aborted, and its place in the group kept.
        """
        try:
            info = await self._client.session_info(session_id)
            if info.state == "open":
                try:
                    reason = "its runner ended"
                    await self._client.abort_session(session_id, reason, keep_place=True)
                except SessionClosed:
                    info = await self._client.session_info(session_id)
        except NotFound:
            return None
        return self._finished(place, info, attempt, None) if info.state in _OVER else None

    # ------------------------------------------------------------------------------------------

    def _opening(
        self, place: RunId, attempt: int, task: str | None, group: tuple[str, int]
    ) -> AgentSession:
        terms, train = self._terms, self._terms.mode == "train"
        name, size = group
        session = AgentSession(
            task or self._plan.group(place),
            group_id=name if train else None,
            group_size=size if train else None,
            mode=terms.mode,
            metadata={
                "run": self._plan.header.run,
                "epoch": place.epoch,
                "item": place.item,
                "member": place.member,
                "attempt": attempt,
            },
            version=terms.version,
            ttl=terms.ttl,
            url=terms.service.named,
            api_key=terms.service.api_key,
            wait=terms.wait,
            retry_for=terms.retry_for,
            idempotency_key=self._plan.key(place, attempt, "open"),
        )
        # The same, and it knows where the key came from.
        session.service = terms.service
        return session

    async def _run(
        self, session: AsyncSession, place: RunId, item: Any, attempt: int
    ) -> SessionInfo:
        """The agent, its reward, its end. _Failed for what is the agent's own failure."""
        returned = await self._called(session, item)
        if session.ended:
            # By the agent itself.
            return await session.info()
        if session.asked_to_end and (info := await session.over()) is not None:
            return info
        try:
            await session.set_returned(returned, self._agent.name)
            return await self._end(session, self._plan.key(place, attempt, "end"), returned)
        except (AgentFailed, Unprocessable) as error:
            code = "no_model_call" if error.code == "no_interactions" else error.code
            raise _Failed(error.message, code) from error

    async def _called(self, session: AsyncSession, item: Any) -> Any:
        """What the agent returns. _Failed for whatever it raises, and if it takes too long."""
        run = asyncio.ensure_future(self._agent(item, session, self._http))
        try:
            await asyncio.wait([run], timeout=self._terms.timeout)
            if not run.done():
                raise _Failed(
                    f"{self._agent.name} took more than {self._terms.timeout:g} s (timeout=)",
                    "agent_timeout",
                )
            if run.cancelled():
                raise _Failed(f"{self._agent.name} was cancelled", "agent_failed")
            error = run.exception()
            if isinstance(error, SessionClosed):
                raise error
            if error is not None:
                raise _Failed(_told(error), "agent_failed") from error
            return run.result()
        finally:
            await cancel_and_wait(run, self._agent.name)

    async def _end(self, session: AsyncSession, key: str, returned: Any) -> SessionInfo:
        missing = self._terms.missing_reward
        try:
            info = await session.finalize(idempotency_key=key)
        except Unprocessable as error:
            if (over := await session.over()) is not None:
                return over
            if error.code != "no_reward":
                raise
            if missing == "fail":
                raise no_reward(returned, self._agent.name) from error
            if missing == "await":
                return await session.finalize(await_reward=True)
            return await session.finalize(missing)
        if info.rewarded is False and missing == "fail" and session.mode == "eval":
            raise no_reward(returned, self._agent.name)
        return info

    # -- ends ----------------------------------------------------------------------------------

    def _finished(
        self, place: RunId, info: SessionInfo, attempt: int, began: float | None
    ) -> RunResult:
        state = _OVER.get(info.state)
        return RunResult(
            item=place.item,
            epoch=place.epoch,
            member=place.member,
            state=state or "failed",
            reward=reward_of(info),
            session_id=info.session_id,
            task_id=info.task_id,
            group_id=info.group_id,
            attempts=attempt + 1,
            seconds=0.0 if began is None else round(time.monotonic() - began, 3),
            error=None if state else f"the session is {info.state}: {info.reason}",
            code=None if state else f"session_{info.state}",
            version=info.last_version,
        )

    async def _closed(
        self, session: AsyncSession, place: RunId, attempt: int, began: float
    ) -> AttemptOutcome:
        """It was over when something was asked of it: of its own, or since a runner before."""
        info = await session.info()
        result = self._finished(place, info, attempt, began)
        return AttemptOutcome(result, again=not result.ok, lost=not result.ok)

    async def _failed(
        self,
        session: AsyncSession,
        place: RunId,
        attempt: int,
        began: float,
        failed: _Failed,
        last: bool,
    ) -> AttemptOutcome:
        last = last or failed.code in _FINAL
        message = failed.message.replace(session.api_key, "<the session's key>")[:500]
        # Names of files, and what models write, may hold half characters, which no JSON takes.
        message = message.encode(errors="replace").decode()
        try:
            await session.abort(f"{failed.code}: {message}", keep_place=not last)
        except SessionClosed:
            outcome = await self._closed(session, place, attempt, began)
            if outcome.lost or failed.code != "no_reward":
                return outcome
        result = RunResult(
            item=place.item,
            epoch=place.epoch,
            member=place.member,
            state="failed",
            session_id=session.session_id,
            task_id=session.task_id,
            group_id=session.group_id,
            attempts=attempt + 1,
            seconds=round(time.monotonic() - began, 3),
            error=message,
            code=failed.code,
        )
        return AttemptOutcome(result, again=not last)


class _Failed(Exception):
    """The agent has failed."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


async def _abort_for_now(session: AsyncSession, error: BaseException) -> None:
    """The runner stops, or dies of something: whoever goes on with the run needs the place."""
    try:
        async with asyncio.timeout(_ABORTS_TIMEOUT):
            await session.abort(f"its runner ended: {type(error).__name__}", keep_place=True)
    except (AnyAgentError, TimeoutError) as problem:
        log.info("session %s is left as it is: %s", session.session_id, problem)


def _told(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def reward_of(info: SessionInfo) -> float | None:
    """The session's final reward plus that of its last rewarded completion."""
    last = next(reversed(info.rewards.values()), None)
    if last is None and info.final_reward is None:
        return None
    return (last or 0.0) + (info.final_reward or 0.0)
