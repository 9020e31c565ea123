"""The run as one rank knows it: weight version, steps, state, checkpoint; and pauses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from pathlib import PurePath
from typing import Any

from any_agent.config import Config
from any_agent.engine import HALF_LOADED, RemoteEngine
from any_agent.errors import AnyAgentError, Conflict, EngineUnavailable, RunFinished
from any_agent.protocol.training import PublishedVersion, RunInfo, SetRun
from any_agent.types import SessionState
from proxy_ext.journal.base import EXPORT_OWNER, Journal, PutMeta, SessionRow, handed_out

log = logging.getLogger(__name__)

RESUME_INTERVAL = 1.0


class EnginePauses:
    """Counts the pauses of sampling for weight updates, and their total time."""

    def __init__(self) -> None:
        self.count = 0
        self._ended_seconds = 0.0
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """Total seconds, the present pause included."""
        running = time.monotonic() - self._began if self._began is not None else 0.0
        return self._ended_seconds + running

    def begin(self) -> None:
        if self._began is None:
            self.count += 1
            self._began = time.monotonic()

    def end(self) -> None:
        self._ended_seconds = self.seconds
        self._began = None


class RunState:
    """The run's state on one rank, stored in the journal for a restart."""

    def __init__(
        self, config: Config, engine: RemoteEngine, journal: Journal, *, training: bool
    ) -> None:
        self._config = config
        self._engine = engine
        self._journal = journal
        self._watchdog: asyncio.Task[None] | None = None
        self.pauses = EnginePauses()
        self.state = "training" if training else "serving"
        self.step = 0
        self.checkpoint: str | None = None
        self.oldest_step: int | None = None
        """The step of the oldest checkpoint that is kept; None: unknown."""
        self._highest = 0
        self._published: int | None = None

    @property
    def version(self) -> int:
        """The weight version that the engine samples with, between publish and resume the next."""
        return self._engine.version if self._published is None else self._published

    async def recover(self) -> None:
        """Load the state from the journal; the version is the engine's own.

        An engine that an earlier process paused resumes: its trainer may be gone, too. An engine in
        the middle of an update resumes once a trainer has sent it all of a version.
        """
        saved: dict[str, Any] = await self._journal.meta("run") or {}
        self.step = saved.get("step", 0)
        # A finished run with further configured steps continues once its trainer is there.
        goes_on = self.state == "training" and self.step < self._config.train.steps
        if saved.get("state") == "finished" and not goes_on:
            self.state = "finished"
        self.checkpoint = saved.get("checkpoint")
        self.oldest_step = saved.get("oldest_step")
        self._highest = self._engine.version
        # An engine that died just now comes back unpaused.
        with contextlib.suppress(EngineUnavailable):
            if self._engine.version == HALF_LOADED:
                await self._engine.hold()
                self._watch(self._resume_until_done())
            else:
                await self._engine.resume(self._engine.version)

    def close(self) -> None:
        """Stop watching a pause; the engine stays as it is for the next process."""
        self._watch(None)

    @property
    def info(self) -> RunInfo:
        c = self._config
        return RunInfo.model_validate(
            {
                "experiment": c.experiment,
                "trial": c.trial,
                "user": c.user,
                "model": c.model.name,
                "state": self.state,
                "version": self.version,
                "step": self.step,
                "checkpoint": self._shown_checkpoint,
            }
        )

    @property
    def _shown_checkpoint(self) -> str | None:
        """The checkpoint as callers see it: in a service for many by its name alone, since they
        have no business with the operator's files."""
        if self.checkpoint is None or self._config.server.lane_tag is None:
            return self.checkpoint
        return PurePath(self.checkpoint).name

    def require_training(self) -> None:
        """Raise RunFinished unless train sessions are wanted."""
        if self.state != "training":
            raise self.not_training()

    def not_training(self) -> RunFinished:
        """Return the error of an open of a train session while nothing is trained."""
        problem = "training has ended" if self.state == "finished" else "no training is going on"
        name = f"{self._config.experiment}/{self._config.trial}"
        use = f"load {self.checkpoint or 'the model'} for inference"
        if self._config.server.lane_tag is not None:
            use = f"call the model {name}, which is what it has learned"
        return RunFinished(
            f"{problem} in {name}, so train sessions are refused; open one with mode=eval, or "
            f"{use}",
            details={"run": self.info.model_dump()},
        )

    async def set_run(self, body: SetRun) -> None:
        data = body.model_dump()
        await self._journal.commit(PutMeta("run", data))
        self.state, self.step, self.checkpoint = body.state, body.step, body.checkpoint
        self.oldest_step = body.oldest_step

    def may_want(self, row: SessionRow) -> bool:
        """Return whether a resume of the training from a kept checkpoint may need a session."""
        if row.state is SessionState.FINALIZED:
            return handed_out(row) and self.state != "finished"
        if row.state not in (SessionState.TRAINED, SessionState.REJECTED):
            return False
        if row.owner == EXPORT_OWNER:
            # An exported session is trained on elsewhere: no step of this run took it.
            return False
        if row.step is None:
            # A step that did not tell its number; or no step, if it was rejected before.
            return row.state is SessionState.TRAINED
        return self.oldest_step is None or row.step > self.oldest_step

    async def pause(self, ttl: float) -> None:
        """Stop sampling for a weight update; it resumes by itself after ``ttl`` seconds."""
        self._watch(self._resume_after(ttl))
        self.pauses.begin()
        await self._engine.pause()

    async def publish(self, body: PublishedVersion) -> None:
        """Take over a version that the engine has and will use from `resume` on.

        Conflict (`version_reused`) for a lower version.
        """
        highest = max(self._highest, self.version)
        if body.version < highest:
            raise Conflict(
                f"version {body.version} is below {highest}; versions only grow: send a higher one",
                code="version_reused",
            )
        self._highest = self._published = body.version
        self.step = body.step

    async def resume(self) -> None:
        """Resume sampling, now or when the engine is back; EngineUnavailable while it is away."""
        try:
            await self._resume_now()
        except AnyAgentError:
            self._watch(self._resume_until_done())
            raise
        self._watch(None)

    async def _resume_now(self) -> None:
        # The engine may have died in the pause and come back with other weights.
        await self._engine.info()
        if self._engine.version == HALF_LOADED:
            raise EngineUnavailable(
                "the engine's weights are half loaded; it serves once its trainer has sent the rest"
            )
        await self._engine.resume(self._engine.version)
        self._published = None
        self.pauses.end()

    def _watch(self, work: Coroutine[Any, Any, None] | None) -> None:
        """Replace the task that ends the pause."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._watchdog = asyncio.create_task(work) if work is not None else None

    async def _resume_after(self, ttl: float) -> None:
        await asyncio.sleep(ttl)
        log.warning("a weight update did not end within %g s; the engine resumes without it", ttl)
        await self._resume_until_done()

    async def _resume_until_done(self) -> None:
        while True:
            try:
                await self._resume_now()
                return
            except AnyAgentError as error:
                log.warning(
                    "the engine could not be resumed, which will be tried again: %s", error.message
                )
            await asyncio.sleep(RESUME_INTERVAL)
