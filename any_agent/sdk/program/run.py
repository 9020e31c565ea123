"""One run of `any-agent run`: a program that is a session, and knows nothing of that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from any_agent.config import ENV_PREFIX
from any_agent.errors import AgentFailed, AnyAgentError, SessionClosed, Unprocessable
from any_agent.protocol.rl import SessionContent, SessionInfo
from any_agent.sdk.find_service import ServiceAddress, borrow_client, return_client
from any_agent.sdk.program.process import Program, ProgramExit, run_program
from any_agent.sdk.program.reward import (
    ProgramReward,
    Reward,
    RewardFile,
    RewardSource,
    last_line,
    reward_from,
)
from any_agent.sdk.session import AsyncSession

RunState: TypeAlias = Literal["finalized", "failed", "interrupted", "not started"]

_RETRY_FOR = 60.0
_ABORTS_TIMEOUT = 5.0
_NO_CALL = (
    "made no model call: its client must go to OPENAI_BASE_URL with OPENAI_API_KEY (or "
    "ANTHROPIC_BASE_URL with ANTHROPIC_API_KEY) of its environment"
)
_NO_REWARD = (
    "was given no reward: take one by --reward-cmd, --reward-file or --grader, or let the program "
    "write it into $ANY_AGENT_REWARD_FILE, or post it to $ANTHROPIC_BASE_URL/rl/v1/set_reward"
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """``command`` is run ``n`` times, ``concurrency`` at once, each for at most ``limit`` seconds;
    what it prints goes to ``folder``. ``failure_reward``: of a run that crashes or takes too long,
    which is thrown away without one. ``wait``: seconds for a slot. ``echo``: show what it prints.
    """

    command: Sequence[str]
    service: ServiceAddress
    folder: Path
    n: int = 1
    concurrency: int = 32
    task_id: str | None = None
    mode: Literal["train", "eval"] = "train"
    metadata: dict[str, Any] = field(default_factory=dict)
    limit: float = 3600.0
    wait: float = 300.0
    source: RewardSource = field(default_factory=RewardSource)
    failure_reward: Reward | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    echo: bool = False


@dataclass(slots=True)
class ProgramRun:
    """What became of one run."""

    run: int
    """Which one, from 0."""
    state: RunState = "not started"
    session_id: str | None = None
    reward: float | None = None
    """The session's final one; None where only single calls were rewarded."""
    calls: int | None = None
    """Those of the policy."""
    exit_code: int | None = None
    """Negative: the signal that ended it; None: it was ended by us, or did not start."""
    seconds: float | None = None
    """That the program took."""
    error: str | None = None
    """Why it failed; or, with a reward, what the reward on failure is for."""
    stdout: str | None = None
    stderr: str | None = None


def without_ours(environ: Mapping[str, str]) -> dict[str, str]:
    """What programs, and what rewards them, inherit: no setting of ours, and no operator's or
    tenant's key."""
    return {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}


async def run_in(
    session: AsyncSession,
    options: RunOptions,
    result: ProgramRun,
    *,
    started: Callable[[Program], object],
    ended: Callable[[], object],
) -> None:
    """Run the program in the session, reward it and end it; ``result`` says how that went.

    AgentFailed, with the session aborted, where the program or its reward failed; the
    AnyAgentError that the service answered.
    """
    try:
        await _run(session, options, result, started, ended)
    except (AgentFailed, Unprocessable) as error:
        await _abort(session, error.message)
        raise
    except asyncio.CancelledError:
        await _abort(session, "any-agent run was interrupted")
        raise


async def _run(
    session: AsyncSession,
    options: RunOptions,
    result: ProgramRun,
    started: Callable[[Program], object],
    ended: Callable[[], object],
) -> None:
    stem = options.folder / session.session_id
    file = RewardFile(options.source.file_of(result.run) or beside(stem, "reward"))
    variables = {
        "ANY_AGENT_SESSION_ID": session.session_id,
        "ANY_AGENT_RUN_INDEX": str(result.run),
        "ANY_AGENT_REWARD_FILE": str(file.path.absolute()),
    }
    # What a Python program prints is to be seen while it runs.
    env = {"PYTHONUNBUFFERED": "1"} | without_ours(options.environ) | session.env() | variables
    mark = f"ANY_AGENT_SESSION_ID={session.session_id}"
    program = Program(options.command, env, mark, beside(stem, "out"), beside(stem, "err"))
    result.stdout, result.stderr = str(program.stdout), str(program.stderr)
    started(program)
    try:
        end = await run_program(program, limit=options.limit)
    finally:
        ended()
    result.exit_code, result.seconds = end.code, round(end.seconds, 3)
    if end.well:
        result.calls = (await session.info()).interactions
        if not result.calls:
            raise AgentFailed(_NO_CALL, code="no_model_call")
        graded = ProgramReward(mark, variables, stem, program.stdout)
        reward = await _reward(session, options, graded, file)
    else:
        result.error = _complaint(end, program).replace(session.api_key, "(its key)")
        if options.failure_reward is None:
            raise AgentFailed(result.error)
        reward = options.failure_reward
    info = await _finalized(session, reward)
    result.state, result.reward, result.calls = "finalized", info.final_reward, info.interactions


async def _reward(
    session: AsyncSession, options: RunOptions, graded: ProgramReward, file: RewardFile
) -> Reward | None:
    source = options.source
    if source.grader is not None:
        graded = replace(graded, content=await _content(session, options.service))
    if source.command is not None or source.grader is not None:
        return await reward_from(source, graded)
    reward = file.read()
    if reward is None and source.file is not None:
        raise AgentFailed(f"did not write the reward file {file.path}", code="no_reward")
    return reward


async def _content(session: AsyncSession, service: ServiceAddress) -> SessionContent:
    client = borrow_client(service, retry_for=_RETRY_FOR)
    try:
        return await client.session_content(session.session_id, session.api_key)
    finally:
        await return_client(service, retry_for=_RETRY_FOR)


async def _finalized(session: AsyncSession, reward: Reward | None) -> SessionInfo:
    try:
        return await session.finalize(reward)
    except SessionClosed:
        # The program may have finalized it itself, with its own reward.
        over = await session.over()
        if reward is not None or over is None or over.state == "aborted":
            raise
        return over
    except Unprocessable as error:
        told = {"no_reward": _NO_REWARD, "no_interactions": _NO_CALL}.get(error.code)
        if told is None:
            raise
        raise AgentFailed(told, code=error.code) from None


async def _abort(session: AsyncSession, reason: str) -> None:
    """Nobody waits long for it: a session that nobody ends expires."""
    session.detach()
    with suppress(AnyAgentError, TimeoutError):
        async with asyncio.timeout(_ABORTS_TIMEOUT):
            await session.abort(reason)


def _complaint(end: ProgramExit, program: Program) -> str:
    """How it ended, and the last thing that it complained of."""
    said = last_line(program.stderr) if end.cut_off is None else ""
    return f"{end}: {said[:200]}" if said else str(end)


def beside(stem: Path, ending: str) -> Path:
    """A session's id may hold dots, so this is no suffix to be replaced."""
    return stem.with_name(f"{stem.name}.{ending}")
