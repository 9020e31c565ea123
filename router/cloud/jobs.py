"""The jobs of the runs: started by a request, queued, stopped, started where they were, removed."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from any_agent.config.cloud import CloudConfig
from any_agent.errors import (
    AnyAgentError,
    BudgetExhausted,
    Conflict,
    NotFound,
    RunNotReady,
    ServiceUnavailable,
)
from any_agent.rundir.layout import RunDir
from any_agent.rundir.usage import UsageReader
from any_agent.runtime.metrics import Histogram
from router.cloud.job import End, Job
from router.cloud.launching import Failure, Launching
from router.cloud.metering import Metering
from router.cloud.schedule import Rules, asked_lately, plan, why_stopped
from router.cloud.store import Answer, Run, RunStore, Wish

log = logging.getLogger(__name__)

_MAX_WAITING = 4096
"""Requests of all runs that wait at once, and half as many of one account."""
_FIRST_PAUSE, _MOST_DOUBLED = 5.0, 6
"""Seconds until a run that failed is started again; each failure doubles them, so many times."""
_ROUND = 0.1
"""Seconds between two looks at the schedule at least."""
_ENDED_BY: dict[Wish, End] = {"serve": "budget", "stop": "stopped", "delete": "deleted"}
"""Why a run had to end, by what its owner wants: if it is to serve, its budget is used up."""
WAIT_OUTCOMES = ("answered", "refused", "left")
_WAIT_BOUNDS = (0.1, 0.5, 1, 2.5, 5, 10, 20, 45, 100)
_REMOVE_EVERY = 5.0
"""Seconds between two attempts to remove a run's files."""


class JobStats:
    """Counts what becomes of the runs and of the requests that wait for them."""

    def __init__(self) -> None:
        self.starts = 0
        self.ends: Counter[End] = Counter()
        """Number of ends of services by reason."""
        self.waits = {outcome: Histogram(_WAIT_BOUNDS) for outcome in WAIT_OUTCOMES}
        """Seconds that requests waited for a run that was not ready."""


class Jobs:
    """All jobs, and the loop that starts and stops them."""

    def __init__(
        self,
        config: CloudConfig,
        store: RunStore,
        launching: Launching,
        metering: Metering,
        folder: Path,
    ) -> None:
        """``folder``: of the files that the cloud itself keeps for each run."""
        self._config = config
        self._store = store
        self._launching = launching
        self._metering = metering
        self._folder = folder
        self._rules = Rules(config.places, config.idle_after, config.quiet_after, config.turn)
        self.stats = JobStats()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self.by_id = {run.id: Job(run, config) for run in store.runs.values()}
        self._halted: dict[str, BudgetExhausted] = {}
        """The accounts whose runs may not run."""

    # -- runs ----------------------------------------------------------------------------------

    async def add(self, job: Job, answer: Answer | None) -> None:
        """Store a new run, with the answer to its request."""
        await self._store.add(job.run, answer)
        job.halted = self._halted.get(job.account)
        self.by_id[job.run.id] = job

    async def change(self, job: Job, wish: Wish, answer: Answer | None = None) -> None:
        """Store what a run's owner wants of it, with the answer to that, and act on it.

        NotFound (`unknown_run`) for one that is being removed, unless that is what is wanted.
        """
        if not await self._store.change(job.run, wish, answer):
            if wish != "delete":
                raise _deleted(job.run)
            if answer is not None:
                await self._store.keep(answer)
        job.run = self._store.runs.get(job.run.id, job.run)
        self._note_end(job)
        if job.run.wish == "delete":
            self._spawn(self._remove(job))

    def halt(self, account: str, why: BudgetExhausted | None) -> None:
        """Let an account's runs end, and none start, as long as its budget is used up."""
        if why is None:
            self._halted.pop(account, None)
        else:
            self._halted[account] = why
        for job in self.of_account(account):
            changes = (job.halted is None) is not (why is None)
            job.halted = why
            if changes:
                self._note_end(job)

    def _note_end(self, job: Job) -> None:
        if job.ends:
            job.wanted_at, job.position = None, 0
            job.hurry()
        self._changed.set()

    def of_account(self, account: str) -> list[Job]:
        """Return the jobs of an account, the oldest run first."""
        # One that is just being made has no job yet.
        found = (self.by_id.get(run.id) for run in self._store.of_account(account))
        return [job for job in found if job is not None]

    async def write_keys(self, account: str) -> None:
        """Give the runs of an account its present keys, which those that run follow at once."""
        folders = [job.dir for job in self.of_account(account)]
        await self._launching.write_keys(account, folders)

    @property
    def places(self) -> int:
        return self._config.places

    def log_of(self, run: Run) -> Path:
        return self._launching.log_of(run)

    async def _remove(self, job: Job) -> None:
        """Remove all files of a run that has ended, and then its row; repeat what fails.

        What it has used is kept.
        """
        if job.removing:
            return
        job.removing = True
        await job.ended.wait()
        while True:
            try:
                gone = await asyncio.to_thread(self._set_aside, job)
                # Nothing writes to it any more.
                await self._metering.copy(job.run, UsageReader(RunDir(gone)), last=True)
                await asyncio.to_thread(self._remove_files, job, gone)
                await self._store.remove(job.run)
            except (OSError, sqlite3.Error, AnyAgentError) as error:
                log.warning("run %s cannot be removed yet: %s", job.run.id, error)
                await asyncio.sleep(_REMOVE_EVERY)
            else:
                self.by_id.pop(job.run.id, None)
                return

    def _set_aside(self, job: Job) -> Path:
        """Return the folder of a run under another name: its own is free at once, and a crash
        leaves a folder that is found by this one."""
        gone = self._folder / f"{job.run.id}.gone"
        if job.dir.path.is_dir():
            # The last process of a killed service may still be writing.
            with job.dir.lock():
                job.dir.path.rename(gone)
        return gone

    def _remove_files(self, job: Job, gone: Path) -> None:
        if gone.is_dir():
            shutil.rmtree(gone)
        for path in self._folder.glob(f"{job.run.id}.*"):
            path.unlink()
        for folder in job.dir.path.parents[:2]:
            # Not empty while there are other trials.
            with suppress(OSError):
                folder.rmdir()

    # -- requests ------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, job: Job) -> AsyncIterator[str]:
        """Yield the URL of a run's router for one request, once the run is ready.

        Conflict (`run_stopped`) for one that its owner stopped; RunNotReady or ServiceUnavailable
        with the reason for one that is not ready within `hold` seconds.
        """
        self._ask(job)
        if not job.ready.is_set():
            await self._until_ready(job)
        job.calls += 1
        try:
            yield job.origin
        finally:
            job.calls -= 1
            job.asked_at = time.monotonic()
            if not job.calls:
                self._changed.set()

    def _ask(self, job: Job) -> None:
        """Note that a request is there for a run; raise for a run that may not be started."""
        if job.run.wish == "delete":
            raise _deleted(job.run)
        if job.run.wish == "stop":
            raise Conflict(
                f"the run {job.run.name} is stopped: POST /rl/v1/runs/{job.run.id}/start first",
                code="run_stopped",
            )
        if job.halted is not None:
            raise job.halted.with_traceback(None)
        now = time.monotonic()
        if not job.ready.is_set() and (job.wanted_at is None or not asked_lately(job, now)):
            # It has left the queue meanwhile, or was not in it.
            job.wanted_at = now
            self._changed.set()
        job.asked_at = now

    async def _until_ready(self, job: Job) -> None:
        since, outcome = time.monotonic(), "left"
        try:
            while not job.ready.is_set():
                await self._wait(job)
            outcome = "answered"
        except AnyAgentError:
            outcome = "refused"
            raise
        finally:
            self.stats.waits[outcome].observe(time.monotonic() - since)

    async def _wait(self, job: Job) -> None:
        waiting = [j for j in self.by_id.values() if j.limits]
        own = sum(j.waiting for j in waiting if j.account == job.account)
        if own >= _MAX_WAITING // 2 or sum(j.waiting for j in waiting) >= _MAX_WAITING:
            raise self._not_ready(job)
        limit = asyncio.timeout(0.0 if self._draining else self._config.hold)
        job.limits.add(limit)
        try:
            async with limit:
                await job.ready.wait()
        except TimeoutError:
            self._ask(job)
            raise self._not_ready(job) from None
        finally:
            job.limits.discard(limit)

    def _not_ready(self, job: Job) -> ServiceUnavailable:
        reason = self.reason(job, job.run)
        message = f"the run {job.run.name} cannot answer yet: {reason}; try again"
        if job.state == "failed":
            again = max(1.0, job.retry_at - time.monotonic())
            return ServiceUnavailable(message, code="run_failed", retry_after=again)
        state, again = ("queued", 15.0) if job.state == "idle" else ("starting", 5.0)
        details = {"state": state, "run": job.run.id, "position": job.position}
        return RunNotReady(message, code=f"run_{state}", retry_after=again, details=details)

    def reason(self, job: Job, run: Run, *, operator: bool = False) -> str:
        """Return in words why a run does not answer requests, or that it does.

        ``run``: the job's, with what its owner wants. The ``operator`` sees a failure's details,
        which may name places on this machine.
        """
        if run.wish != "serve":
            return "it is being removed" if run.wish == "delete" else "its owner stopped it"
        if job.halted is not None:
            return job.halted.message
        if self._draining:
            return "the service stops"
        if job.state == "failed":
            pause = job.retry_at - time.monotonic()
            when = f"in {pause:.0f} s at the earliest" if pause > 0 else "at once"
            failed = job.failure
            details = f" ({failed.details})" if operator and failed.details else ""
            return f"{failed.words}{details}; a request starts it again, {when}"
        if job.state == "idle" and job.position:
            taken = sum(other.takes_place for other in self.by_id.values())
            return (
                f"{taken} of {self._config.places} places are taken, and it is number "
                f"{job.position} in the queue"
            )
        return {
            "idle": "nothing has asked for it lately; the next request starts it",
            "starting": "it starts",
            "running": "it answers",
            "stopping": "it finishes its step and stops; then it is started again",
        }[job.state]

    # -- starts and ends -----------------------------------------------------------------------

    async def keep(self) -> None:
        """Start and stop runs until it is cancelled; then kill those that are left."""
        try:
            for job in list(self.by_id.values()):
                if job.run.wish == "delete":
                    # A crash came between.
                    self._spawn(self._remove(job))
            while True:
                again_at = self._round()
                # Many requests that end at once are one change.
                await asyncio.sleep(_ROUND)
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, again_at - time.monotonic())):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _round(self) -> float:
        """Start and stop what the schedule says; return when to look again at the latest."""
        now = time.monotonic()
        todo = plan(self.by_id.values(), now, self._rules)
        for job in self.by_id.values():
            job.position = 0
        for position, job in enumerate(todo.queue, 1):
            job.position = position
        for job in todo.stop:
            why = why_stopped(job, now, self._rules)
            self._stop(job, _ENDED_BY[job.run.wish] if why == "owner" else why)
        for job in () if self._draining else todo.start:
            self._begin(job)
        return todo.again_at

    def _begin(self, job: Job) -> None:
        taken = {other.place for other in self.by_id.values() if other.takes_place}
        job.place = next(k for k in range(self._config.places) if k not in taken)
        job.state, job.position = "starting", 0
        self.stats.starts += 1
        job.ended.clear()
        job.leaves.clear()
        self._spawn(self._serve(job))

    def _stop(self, job: Job, why: End) -> None:
        """Let a run finish the requests and the step under way, and end."""
        log.info("run %s (%s) stops: %s", job.run.id, job.run.name, why)
        job.state, job.end = "stopping", why
        job.ready.clear()
        job.leaves.set()

    async def _serve(self, job: Job) -> None:
        def became_ready(origin: str) -> None:
            log.info("run %s (%s) is ready", job.run.id, job.run.name)
            job.origin, job.state = origin, "running"
            job.failures, job.wanted_at = 0, None
            job.started_at = time.monotonic()
            job.ready.set()
            self._changed.set()

        problem: Failure | None = Failure("it was cut off")
        try:
            async with self._metering.staying(job.run, self._launching.gpus_of(job.place)):
                problem = await self._launching.serve(
                    job.run, job.dir, job.place, job.leaves, became_ready
                )
        except sqlite3.Error as error:
            problem = Failure("its place cannot be noted for its bill", str(error))
        finally:
            self._ended(job, problem)

    def _ended(self, job: Job, problem: Failure | None) -> None:
        now = time.monotonic()
        job.ready.clear()
        job.wanted_at = now if job.waiting and not job.ends else None
        job.state = "idle"
        self.stats.ends["failed" if problem is not None else job.end] += 1
        if problem is not None and not job.ends:
            pause = _FIRST_PAUSE * 2 ** min(job.failures, _MOST_DOUBLED)
            job.failures += 1
            job.state, job.failure, job.retry_at = "failed", problem, now + pause
            told = (problem.words, problem.details or self.log_of(job.run))
            log.error("run %s (%s): %s (%s)", job.run.id, job.run.name, *told)
        job.ended.set()
        self._changed.set()

    async def drain(self) -> None:
        """Answer the requests that wait, let every run finish what is under way, and wait for
        their ends."""
        self._draining = True
        for job in list(self.by_id.values()):
            job.hurry()
            if job.state in ("starting", "running"):
                self._stop(job, "draining")
        for job in list(self.by_id.values()):
            await job.ended.wait()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _deleted(run: Run) -> NotFound:
    return NotFound(f"the run {run.name} was deleted", code="unknown_run")
