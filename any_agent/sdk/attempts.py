"""`AttemptRunner`: one attempt at one run of an agent, from its session's opening to its end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from any_agent.client.retry_transport import SharedClient
from any_agent.client.rl_client import RLClient
from any_agent.errors import AgentFailed, NotFound, SessionClosed, Unprocessable
from any_agent.protocol.rl import SessionInfo
from any_agent.rewards.returned import no_reward
from any_agent.runtime.event_loop import cancel_and_wait
from any_agent.sdk.open_session import AgentSession
from any_agent.sdk.results import ResultsLog, RunResult, RunState
from any_agent.sdk.run_plan import RunId
from any_agent.sdk.session import AsyncSession

MissingReward: TypeAlias = float | Literal["fail", "await"]
"""The treatment of a run without a reward: it gets this number, fails, or awaits its reward from
another caller."""

_RUN_STATES: dict[str, RunState] = {
    "finalized": "finalized",
    "leased": "finalized",
    "trained": "finalized",
    # The trainer rejected it, alone or with its group: the agent has done its part.
    "rejected": "finalized",
    "evaluated": "evaluated",
    "awaiting_reward": "awaiting_reward",
}
"""The state of a run by that of its session; in other states the session is open, or lost."""
_FINAL_CODES = {"invalid_reward", "no_model_call", "no_reward"}
"""Failures that another attempt would only repeat."""


class Agent(Protocol):
    @property
    def name(self) -> str:
        """The agent's name in messages."""

    async def __call__(
        self, item: Any, session: AsyncSession, http_client: SharedClient | None
    ) -> Any: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a run."""

    run: RunId
    item: Any
    session: AgentSession
    """The session that it opens."""
    number: int = 0
    end_key: str | None = None
    """The idempotency key of the session's end."""
    last: bool = True
    """No other attempt takes its place in the group if it fails."""
    interrupt_reason: str | None = None
    """The reason that an interrupted attempt's session is aborted with. None: the runner that
    resumes the run needs its place in the group, which is kept."""


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """The result of an attempt; ``lost`` if its session ended by itself (it expired, or another
    caller aborted it), so that nothing is known of the agent."""

    result: RunResult
    retry: bool = False
    """Another attempt may do better; its place in the group is kept for it."""
    lost: bool = False


def ending_of(error: BaseException) -> str:
    """Return what ended a program that was running a session, as a predicate."""
    if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return "was interrupted, by Ctrl-C, a signal, or a time limit around it"
    return f"ended: {type(error).__name__}"


@dataclass(frozen=True, slots=True)
class AttemptRunner:
    """Makes attempts; raises errors of the service that concern all runs alike."""

    agent: Agent
    timeout: float | None = None
    missing_reward: MissingReward = "fail"
    log: ResultsLog = field(default_factory=lambda: ResultsLog(None))
    http: SharedClient | None = None

    async def run_attempt(self, attempt: Attempt) -> AttemptOutcome:
        """Open a session, run the agent in it, and end it.

        Raises what :class:`AgentSession` raises where no session can be opened (Conflict
        `group_closed`: its group goes without it).
        """
        opening = attempt.session
        try:
            session = await opening.__aenter__()
        except asyncio.CancelledError:
            # A session that was opened was aborted, too.
            await self.log.void(attempt.run, attempt.number)
            raise
        started = time.monotonic()
        interruption: BaseException | None = None
        try:
            await self.log.opened(attempt.run, attempt.number, session.session_id)
            try:
                info = await self._run_agent(session, attempt)
                return AttemptOutcome(_result(attempt.run, info, attempt.number, started))
            except SessionClosed:
                return await self._result_of_closed(session, attempt, started)
            except AgentFailed as failure:
                return await self._result_of_failure(session, attempt, started, failure)
        except BaseException as error:
            interruption = error
            # The runner stops, or fails: the runner that resumes the run needs the place.
            await session.abort_quietly(
                attempt.interrupt_reason or f"its runner {ending_of(error)}",
                keep_place=attempt.interrupt_reason is None,
            )
            raise
        finally:
            session.detach()
            kind = type(interruption) if interruption is not None else None
            await opening.__aexit__(kind, interruption, None)

    async def _run_agent(self, session: AsyncSession, attempt: Attempt) -> SessionInfo:
        """Run the agent, set its reward and end the session; AgentFailed for its failure."""
        returned = await self._call_agent(session, attempt.item)
        if session.ended:
            # The agent has ended it itself.
            return await session.info()
        if session.asked_to_end and (info := await session.end_state()) is not None:
            return info
        try:
            await session.set_returned(returned, self.agent.name)
            return await self._finalize(session, attempt.end_key, returned)
        except Unprocessable as error:
            code = "no_model_call" if error.code == "no_interactions" else error.code
            raise AgentFailed(error.message, code=code) from error

    async def _call_agent(self, session: AsyncSession, item: Any) -> Any:
        """Return the agent's result; AgentFailed if it raises, or takes too long."""
        run = asyncio.ensure_future(self.agent(item, session, self.http))
        name = self.agent.name
        try:
            await asyncio.wait([run], timeout=self.timeout)
            if not run.done():
                message = f"{name} took more than {self.timeout:g} s (timeout=)"
                raise AgentFailed(message, code="agent_timeout")
            if run.cancelled():
                raise AgentFailed(f"{name} was cancelled")
            error = run.exception()
            if error is None or isinstance(error, SessionClosed):
                return run.result()
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise AgentFailed(error.message if isinstance(error, AgentFailed) else text) from error
        finally:
            await cancel_and_wait(run, name)

    async def _finalize(self, session: AsyncSession, key: str | None, returned: Any) -> SessionInfo:
        missing = self.missing_reward
        try:
            info = await session.finalize(idempotency_key=key)
        except Unprocessable as error:
            if (ended := await session.end_state()) is not None:
                return ended
            if error.code != "no_reward":
                raise
            if missing == "fail":
                raise no_reward(returned, self.agent.name) from error
            if missing == "await":
                return await session.finalize(await_reward=True)
            return await session.finalize(missing)
        if info.rewarded is False and missing == "fail" and session.mode == "eval":
            raise no_reward(returned, self.agent.name)
        return info

    async def _result_of_closed(
        self, session: AsyncSession, attempt: Attempt, started: float
    ) -> AttemptOutcome:
        """Return the outcome of a session that had ended, by itself or by an earlier runner."""
        result = _result(attempt.run, await session.info(), attempt.number, started)
        return AttemptOutcome(result, retry=not result.ok, lost=not result.ok)

    async def _result_of_failure(
        self, session: AsyncSession, attempt: Attempt, started: float, failure: AgentFailed
    ) -> AttemptOutcome:
        last = attempt.last or failure.code in _FINAL_CODES
        message, reason = (
            # File names and models' output may have lone surrogates, which JSON cannot hold.
            text.replace(session.api_key, "<the session's key>")[:500]
            .encode(errors="replace")
            .decode()
            for text in (failure.message, f"{failure.code}: {failure.message}")
        )
        try:
            await session.abort(reason, keep_place=not last)
        except SessionClosed:
            outcome = await self._result_of_closed(session, attempt, started)
            if outcome.lost or failure.code != "no_reward":
                return outcome
        result = RunResult(
            **attempt.run._asdict(),
            state="failed",
            session_id=session.session_id,
            task_id=session.task_id,
            group_id=session.group_id,
            attempts=attempt.number + 1,
            seconds=round(time.monotonic() - started, 3),
            error=message,
            code=failure.code,
        )
        return AttemptOutcome(result, retry=not last)


async def recover_result(
    client: RLClient, run: RunId, session_id: str, number: int
) -> RunResult | None:
    """Return the result of an attempt that an earlier runner began, or None if another attempt is
    needed: an open session is aborted then, and its place in the group kept."""
    try:
        info = await client.session_info(session_id)
        if info.state == "open":
            try:
                await client.abort_session(session_id, "its runner ended", keep_place=True)
            except SessionClosed:
                info = await client.session_info(session_id)
    except NotFound:
        return None
    return _result(run, info, number, None) if info.state in _RUN_STATES else None


def _result(run: RunId, info: SessionInfo, number: int, started: float | None) -> RunResult:
    state = _RUN_STATES.get(info.state)
    return RunResult(
        **run._asdict(),
        state=state or "failed",
        reward=_reward_of(info),
        session_id=info.session_id,
        task_id=info.task_id,
        group_id=info.group_id,
        attempts=number + 1,
        seconds=0.0 if started is None else round(time.monotonic() - started, 3),
        error=None if state else f"the session is {info.state}: {info.reason}",
        code=None if state else f"session_{info.state}",
        version=info.last_version,
    )


def _reward_of(info: SessionInfo) -> float | None:
    """Return the session's final reward plus that of its last rewarded completion."""
    last = next(reversed(info.rewards.values()), None)
    if last is None and info.final_reward is None:
        return None
    return (last or 0.0) + (info.final_reward or 0.0)
