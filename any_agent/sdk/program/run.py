"""`ProgramGroup`: the runs of `any-agent run`, each a program that is one session."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from any_agent.client.retry_transport import SharedClient
from any_agent.config import ENV_PREFIX
from any_agent.errors import (
    AgentFailed,
    AnyAgentError,
    ConfigError,
    Conflict,
    Forbidden,
    InvalidRequest,
    RunFinished,
    ServiceUnavailable,
    SessionClosed,
    Unauthenticated,
    Unprocessable,
    WrongService,
)
from any_agent.protocol.rl import Rewards, SessionInfo
from any_agent.sdk.attempts import Attempt, AttemptRunner
from any_agent.sdk.find_service import ServiceAddress
from any_agent.sdk.open_session import AgentSession, find_run
from any_agent.sdk.program.process import OutputEcho, Program, ProgramExit, run_program
from any_agent.sdk.program.reward import Reward, RewardFile, RewardSource, beside, last_line
from any_agent.sdk.run_plan import RunId
from any_agent.sdk.session import AsyncSession

UNUSABLE = (Unauthenticated, Forbidden, ServiceUnavailable, WrongService, RunFinished)
"""Errors of the service, its key, or the end of its training, which prevent every run."""
_REFUSED = (*UNUSABLE, InvalidRequest, Unprocessable, Conflict, ConfigError)
"""Errors of opening a session that every other run would get, too."""
_TTL_MARGIN = 300.0
"""Seconds that a session may live beyond the limits of its program and its reward."""
_NO_CALL = (
    "made no model call: its client must use OPENAI_BASE_URL and OPENAI_API_KEY (or "
    "ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY) of its environment"
)
_NO_REWARD = (
    "has no reward: name its source by --reward-cmd, --reward-file or --grader, or let the program "
    "write it into $ANY_AGENT_REWARD_FILE, or post it to $ANTHROPIC_BASE_URL/rl/v1/set_reward"
)

RunState: TypeAlias = Literal["finalized", "failed", "interrupted", "not started"]


@dataclass(slots=True)
class ProgramRun:
    """One run and its result."""

    run: int
    """The run's number, from 0."""
    state: RunState = "not started"
    session_id: str | None = None
    reward: float | None = None
    """The session's final reward; None where only single calls were rewarded."""
    calls: int | None = None
    """Model calls of the policy."""
    exit_code: int | None = None
    """The exit code, or the negative number of the signal that ended it; None: its runner ended it,
    or it did not start."""
    seconds: float | None = None
    """Seconds that the program ran."""
    error: str | None = None
    """The reason of its failure, also where it got the reward of a failure."""
    stdout: str | None = None
    stderr: str | None = None


@dataclass(eq=False, kw_only=True, repr=False)
class ProgramGroup:
    """All runs of one command: it is run ``n`` times, ``concurrency`` at once, each for at most
    ``limit`` seconds; its output goes to ``folder``. Call :meth:`run` once.

    ``failure_reward`` is for a run that crashes or takes too long, which is aborted without one.
    ``wait``: seconds for a slot. ``echo``: also show the output. ``results`` fills as runs end, and
    ``ended`` is called with each.
    """

    command: Sequence[str]
    service: ServiceAddress
    folder: Path
    n: int = 1
    concurrency: int = 32
    task_id: str | None = None
    mode: Literal["train", "eval"] = "train"
    metadata: dict[str, Any] = field(default_factory=dict)
    rewards: Rewards | None = None
    """None: `judge` where a command or a grader gives the reward, else `agent`."""
    limit: float = 3600.0
    wait: float = 300.0
    source: RewardSource = field(default_factory=RewardSource)
    failure_reward: Reward | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    echo: bool = False
    ended: Callable[[ProgramRun], object] = lambda _: None

    def __post_init__(self) -> None:
        self.name = self.command[0]
        self.results = [ProgramRun(index) for index in range(self.n)]
        self.stopped: AnyAgentError | None = None
        """The reason why the remaining runs did not start."""
        self.group_id = f"run-{uuid.uuid4().hex[:16]}" if self.n > 1 else None
        self._slots = asyncio.Semaphore(self.concurrency)
        self._echoes: list[OutputEcho] = []
        self._attempts = AttemptRunner(self)

    async def run(self) -> None:
        """Make all runs.

        ConfigError for a missing command or grader, and for names that a service does not accept.
        """
        try:
            self._session()
        except InvalidRequest as error:
            raise ConfigError(f"--{error.message}".replace("--task_id", "--task", 1)) from None
        _require_program(self.command[0], self.environ)
        await self.source.check(self.folder)
        try:
            await self._check_service()
        except UNUSABLE as error:
            self.stopped = error
            return
        async with asyncio.TaskGroup() as group:
            for result in self.results:
                group.create_task(self._run(result))

    def show_rest(self) -> None:
        """Show the rest of the program's output; waits for its reader."""
        for echo in self._echoes:
            echo.finish()

    async def _check_service(self) -> None:
        """Raise early if the service cannot be reached, or its training has ended."""
        info = await find_run(self.service)
        if info.state == "finished" and self.mode == "train":
            raise RunFinished(
                f"the training of {info.experiment}/{info.trial} has ended at step {info.step}: "
                "no train session can be opened; use --mode eval"
            )

    async def _run(self, run: ProgramRun) -> None:
        async with self._slots:
            if self.stopped is not None:
                return
            attempt = Attempt(
                RunId(0, 0, run.run),
                run,
                self._session(),
                interrupt_reason="any-agent run was interrupted",
            )
            try:
                outcome = await self._attempts.run_attempt(attempt)
                if run.state == "not started":
                    run.state, run.error = "failed", outcome.result.error
            except asyncio.CancelledError:
                if run.session_id is not None and run.state != "finalized":
                    run.state = "interrupted"
                raise
            except AnyAgentError as error:
                if run.session_id is None and isinstance(error, _REFUSED):
                    self.stopped = self.stopped or error
                    return
                if run.state != "finalized":
                    run.state, run.error = "failed", run.error or str(error)
            self.ended(run)

    def _session(self) -> AgentSession:
        return AgentSession(
            self.task_id,
            group_id=self.group_id,
            group_size=self.n if self.group_id is not None else None,
            mode=self.mode,
            metadata=self.metadata,
            ttl=self.limit + self.source.limit + _TTL_MARGIN,
            rewards=self.rewards or ("judge" if self.source.judges else "agent"),
            url=self.service.named,
            api_key=self.service.api_key,
            wait=self.wait,
        )

    async def __call__(
        self, item: ProgramRun, session: AsyncSession, http_client: SharedClient | None = None
    ) -> None:
        """Run the program in its session, reward the session and finalize it, as the agent of an
        attempt; AgentFailed if the program, its reward or the service's request fails.

        The item gets the result.
        """
        item.session_id = session.session_id
        try:
            await self._run_program(item, session)
        except (AnyAgentError, OSError) as error:
            item.state, item.error = "failed", str(error)
            raise AgentFailed(item.error) from error

    async def _run_program(self, run: ProgramRun, session: AsyncSession) -> None:
        stem = self.folder / session.session_id
        file = RewardFile(self.source.file_of(run.run) or beside(stem, "reward"))
        variables = {
            "ANY_AGENT_SESSION_ID": session.session_id,
            "ANY_AGENT_RUN_INDEX": str(run.run),
            "ANY_AGENT_REWARD_FILE": str(file.path.absolute()),
        }
        inherited = without_ours(self.environ, self.service.api_key)
        # A Python program's output is then visible while it runs.
        env = {"PYTHONUNBUFFERED": "1"} | inherited | session.env() | variables
        mark = f"ANY_AGENT_SESSION_ID={session.session_id}"
        program = Program(self.command, env, mark, beside(stem, "out"), beside(stem, "err"))
        run.stdout, run.stderr = str(program.stdout), str(program.stderr)
        if self.echo:
            self._echoes = [OutputEcho(program.stdout, 1), OutputEcho(program.stderr, 2)]
        try:
            end = await run_program(program, limit=self.limit)
        finally:
            for echo in self._echoes:
                echo.end()
        run.exit_code, run.seconds = end.code, round(end.seconds, 3)
        if end.success:
            run.calls = (await session.info()).interactions
            if not run.calls:
                raise AgentFailed(_NO_CALL, code="no_model_call")
            reward = await self._reward(session, program, variables, file)
        else:
            run.error = _describe_exit(end, program).replace(session.api_key, "(its key)")
            if self.failure_reward is None:
                raise AgentFailed(run.error)
            reward = self.failure_reward
        info = await _finalize(session, reward)
        run.state, run.reward, run.calls = "finalized", info.final_reward, info.interactions

    async def _reward(
        self,
        session: AsyncSession,
        program: Program,
        variables: Mapping[str, str],
        file: RewardFile,
    ) -> Reward | None:
        source = self.source
        content = await session.content() if source.grader is not None else None
        if source.command is not None or source.grader is not None:
            return await source.reward(program, variables, content)
        reward = file.read()
        if reward is None and source.file is not None:
            raise AgentFailed(f"did not write the reward file {file.path}", code="no_reward")
        return reward


def without_ours(environ: Mapping[str, str], key: str | None) -> dict[str, str]:
    """Return the environment of programs and reward commands: without any-agent's settings, and
    without the key that opens sessions, whatever variable it is in."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(ENV_PREFIX) and not (key and key in value)
    }


async def _finalize(session: AsyncSession, reward: Reward | None) -> SessionInfo:
    try:
        return await session.finalize(reward)
    except SessionClosed:
        # The program may have finalized the session itself, with its own reward.
        ended = await session.end_state()
        if reward is not None or ended is None or ended.state == "aborted":
            raise
        return ended
    except Unprocessable as error:
        message = {"no_reward": _NO_REWARD, "no_interactions": _NO_CALL}.get(error.code)
        if message is None:
            raise
        raise AgentFailed(message, code=error.code) from None


def _describe_exit(end: ProgramExit, program: Program) -> str:
    """Describe how the program ended, with the last line of its standard error."""
    line = last_line(program.stderr) if end.cut_off is None else ""
    return f"{end}: {line[:200]}" if line else str(end)


def _require_program(name: str, environ: Mapping[str, str]) -> None:
    """Raise ConfigError unless there is such a program and it is executable."""
    if shutil.which(name, path=environ.get("PATH", os.defpath)) is None:
        raise ConfigError(
            f"there is no program {name}"
            + (", or it is not executable" if os.sep in name else " on the PATH")
        )
