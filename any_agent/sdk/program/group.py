"""All runs of one `any-agent run`: a group of sessions, some of them at once."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import Callable, Mapping

from any_agent.errors import (
    AnyAgentError,
    ConfigError,
    Conflict,
    Forbidden,
    InvalidRequest,
    RunFinished,
    ServiceUnavailable,
    Unauthenticated,
    Unprocessable,
    WrongService,
)
from any_agent.sdk.find_service import borrow_client, return_client
from any_agent.sdk.open_session import run_info
from any_agent.sdk.program.echo import OutputEcho
from any_agent.sdk.program.process import Program
from any_agent.sdk.program.reward import check_source
from any_agent.sdk.program.run import ProgramRun, RunOptions, run_in
from any_agent.sdk.session import AgentSession

UNUSABLE = (Unauthenticated, Forbidden, ServiceUnavailable, WrongService, RunFinished)
"""What keeps any run from being a session: the service, its key, or the end of its training."""
_REFUSED = (*UNUSABLE, InvalidRequest, Unprocessable, Conflict, ConfigError)
"""Of an open: no other one that is like it would be taken."""
_ANSWERS_TIMEOUT = 5.0
_SPARE = 300.0
"""Seconds that a session may live longer than its program and its reward may take."""


class ProgramGroup:
    """Give it the options, run it once; ``results`` fills as runs end, and `ended` is told."""

    def __init__(
        self, options: RunOptions, *, ended: Callable[[ProgramRun], object] = lambda _: None
    ) -> None:
        self.options = options
        self.results = [ProgramRun(index) for index in range(options.n)]
        self.stopped: AnyAgentError | None = None
        """Why those that were not started are not."""
        self.group_id = f"run-{uuid.uuid4().hex[:16]}" if options.n > 1 else None
        self._ended = ended
        self._places = asyncio.Semaphore(options.concurrency)
        self._echoes: list[OutputEcho] = []

    async def run(self) -> None:
        """Until all have ended.

        ConfigError for a command or a grader that is not there, and for names that none takes.
        """
        self._require_fields()
        require_program(self.options.command[0], self.options.environ)
        await check_source(self.options.source, self.options.folder)
        try:
            await self._reach()
        except UNUSABLE as error:
            self.stopped = error
            return
        async with asyncio.TaskGroup() as group:
            for result in self.results:
                group.create_task(self._run(result))

    def show_rest(self) -> None:
        """What was printed and is not shown yet; waits for who reads it."""
        for echo in self._echoes:
            echo.finish()

    def _require_fields(self) -> None:
        try:
            self._session()
        except InvalidRequest as error:
            raise ConfigError(f"--{error.message}".replace("--task_id", "--task", 1)) from None

    async def _reach(self) -> None:
        """So that it is said once, and soon, that the service is away or its training has ended."""
        service = self.options.service
        within = service.patience if service.file is not None else _ANSWERS_TIMEOUT
        client = borrow_client(service, retry_for=within)
        try:
            info = await run_info(client, service)
        finally:
            await return_client(service, retry_for=within)
        if info.state == "finished" and self.options.mode == "train":
            raise RunFinished(
                f"the training of {info.experiment}/{info.trial} has ended at step {info.step}: it "
                "takes no more train sessions; --mode eval goes on"
            )

    async def _run(self, result: ProgramRun) -> None:
        async with self._places:
            if self.stopped is not None:
                return
            try:
                async with self._session() as session:
                    result.session_id = session.session_id
                    await run_in(
                        session, self.options, result, started=self._show, ended=self._end_shows
                    )
            except asyncio.CancelledError:
                if result.session_id is not None and result.state != "finalized":
                    result.state = "interrupted"
                raise
            except (AnyAgentError, OSError) as error:
                if result.session_id is None and isinstance(error, _REFUSED):
                    self.stopped = self.stopped or error
                    return
                result.state, result.error = "failed", str(error)
            self._ended(result)

    def _session(self) -> AgentSession:
        options = self.options
        return AgentSession(
            options.task_id,
            group_id=self.group_id,
            group_size=options.n if self.group_id is not None else None,
            mode=options.mode,
            metadata=options.metadata,
            ttl=options.limit + options.source.limit + _SPARE,
            url=options.service.named,
            api_key=options.service.api_key,
            wait=options.wait,
        )

    def _show(self, program: Program) -> None:
        if self.options.echo:
            self._echoes = [OutputEcho(program.stdout, 1), OutputEcho(program.stderr, 2)]

    def _end_shows(self) -> None:
        for echo in self._echoes:
            echo.end()


def require_program(name: str, environ: Mapping[str, str]) -> None:
    """ConfigError unless there is such a program, which can be run."""
    if shutil.which(name, path=environ.get("PATH", os.defpath)) is None:
        raise ConfigError(
            f"there is no program {name}"
            + (", or it is not executable" if os.sep in name else " on the PATH")
        )
