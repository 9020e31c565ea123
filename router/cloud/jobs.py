"""The services of the runs: started by a request, queued, stopped, started where they were."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import yaml
from multidict import CIMultiDict

from any_agent.auth.access import signer_of
from any_agent.auth.key_store import StoredKey, StoredKeys
from any_agent.config.cloud import CloudConfig
from any_agent.config.load import ADMIN_KEY_VARIABLE
from any_agent.errors import (
    AnyAgentError,
    Conflict,
    NotFound,
    RunNotReady,
    ServiceUnavailable,
    StartupError,
)
from any_agent.keys import KeySigner
from any_agent.launcher.process import Command, SupervisedProcess
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import make_folder, make_shared_folder, write_atomic
from any_agent.runtime.ports import keep, port_of, url_of
from router.cloud.schedule import Rules, State, plan
from router.cloud.store import Run, RunStore, wishing
from router.upstream import NeverSent, Upstream

log = logging.getLogger(__name__)

T = TypeVar("T")
PROGRAM = ("any_agent.cli", "serve")
"""The module that serves a run, and its first arguments."""
_HOST = "127.0.0.1"
_READY_EVERY = 0.25
"""Seconds between two looks whether a run that starts is ready."""
_MAX_WAITING = 4096
"""Requests of all runs that wait at once, and half as many of one account."""
_MAX_LOG = 1 << 20
"""Bytes of a run's console above which its next start begins another file; one is kept."""
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0
"""Seconds until a run that failed is started again; each failure doubles them."""


class Job:
    """The service of one run. Times are monotonic seconds."""

    def __init__(self, run: Run, config: CloudConfig) -> None:
        self.run = run
        self.dir = RunDir.of(config.root, run.account, run.experiment, run.trial)
        self.state: State = "idle"
        self.wanted_at: float | None = None
        self.asked_at = time.monotonic()
        self.started_at = 0.0
        self.retry_at = 0.0
        self.calls = 0
        self.waiting = 0
        """Requests that wait until it is ready."""
        self.failures = 0
        """Failures since it was ready last."""
        self.note = ""
        """The words of its last failure."""
        self.position = 0
        """Its position in the queue, from 1; 0 while it is not in it."""
        self.origin = ""
        """The URL of its router."""
        self.ready = asyncio.Event()
        self.leaves = asyncio.Event()
        """It is to finish what is under way, and end."""
        self.ended = asyncio.Event()
        """No process of it runs."""
        self.ended.set()
        self.process: SupervisedProcess | None = None
        self.kept: socket.socket | None = None
        """Keeps its port from other users of the machine."""
        self._signer: KeySigner | None = None

    @property
    def ends(self) -> bool:
        return self.run.wish != "serve"

    def knows(self, key: str, prefix: str) -> bool:
        """Return whether a session's or a judge's key is one of this run."""
        if self._signer is None:
            if not self.dir.secret.exists():
                # It was never started, so it has no session.
                return False
            self._signer = signer_of(self.dir)
        return self._signer.verify(key, prefix) is not None


class Jobs:
    """All jobs, and the loop that starts and stops them."""

    def __init__(
        self,
        config: CloudConfig,
        store: RunStore,
        folder: Path,
        upstream: Upstream,
        keys_of: Callable[[str], Iterable[StoredKey]],
        public_url: str,
    ) -> None:
        """``folder``: for settings and logs; ``keys_of`` returns an account's keys."""
        self._config = config
        self._store = store
        self._folder = folder
        self._upstream = upstream
        self._keys_of = keys_of
        self._public_url = public_url
        self._rules = Rules(config.places, config.idle_after, config.quiet_after, config.turn)
        self._changed = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._limits: set[asyncio.Timeout] = set()
        """The time limits of requests that wait."""
        self._draining = False
        # Children end with the thread that started them, so that one lives as long as we do.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs")
        self.by_id = {run.id: Job(run, config) for run in store.runs.values()}

    # -- runs ----------------------------------------------------------------------------------

    def add(self, run: Run) -> Job:
        job = self.by_id[run.id] = Job(run, self._config)
        return job

    def log_of(self, run: Run) -> Path:
        return self._folder / f"{run.id}.log"

    def _settings_of(self, run: Run) -> Path:
        return self._folder / f"{run.id}.yaml"

    async def update(self, run: Run) -> Job:
        """Store a run's new wish, and act on it."""
        await self._store.put(run)
        job = self.by_id[run.id]
        job.run = run
        if job.ends:
            job.wanted_at, job.position = None, 0
        else:
            job.failures, job.retry_at = 0, 0.0
        self._changed.set()
        return job

    async def delete(self, run: Run) -> Job:
        """Store that a run is to be removed, and begin with it; it goes on after a crash."""
        job = await self.update(wishing(run, "delete"))
        name = f"delete {run.id}"
        if name not in self._tasks:
            task = self._tasks[name] = asyncio.create_task(self._delete(job))
            task.add_done_callback(lambda _: self._tasks.pop(name, None))
        return job

    async def _delete(self, job: Job) -> None:
        run = job.run
        await job.ended.wait()
        await self._in_thread(lambda: self._remove_files(job))
        await self._store.remove(run)
        self.by_id.pop(run.id, None)

    def _remove_files(self, job: Job) -> None:
        # Its name is free at once, and a crash leaves a folder that is found by this name.
        gone = self._folder / f"{job.run.id}.gone"
        with suppress(FileNotFoundError):
            job.dir.path.rename(gone)
        with suppress(FileNotFoundError):
            shutil.rmtree(gone)
        for path in self._folder.glob(f"{job.run.id}.*"):
            path.unlink()
        for folder in job.dir.path.parents[:2]:
            # Not empty while there are other trials.
            with suppress(OSError):
                folder.rmdir()

    async def write_keys(self, account: str) -> None:
        """Give the runs of an account its present keys, which those that run follow at once."""
        jobs = [job for job in self.by_id.values() if job.run.account == account]
        await self._in_thread(lambda: self._write_keys(*jobs))

    def _write_keys(self, *jobs: Job) -> None:
        for job in jobs:
            if job.dir.path.is_dir():
                keys = StoredKeys(keys=tuple(self._keys_of(job.run.account)))
                write_atomic(job.dir.keys, keys.model_dump_json(exclude_none=True) + "\n")

    # -- requests ------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, job: Job) -> AsyncIterator[str]:
        """Yield the URL of a run's router for one request, once the run is ready.

        Conflict (`run_stopped`) for one that its owner stopped; ServiceUnavailable with the reason
        for one that is not ready within `hold` seconds.
        """
        self._ask(job)
        if not job.ready.is_set():
            await self._wait(job)
        job.calls += 1
        try:
            yield job.origin
        finally:
            job.calls -= 1
            job.asked_at = time.monotonic()
            if not job.calls:
                self._changed.set()

    def _ask(self, job: Job) -> None:
        if job.run.wish == "delete":
            raise NotFound(f"the run {job.run.name} was deleted", code="unknown_run")
        if job.run.wish == "stop":
            raise Conflict(
                f"the run {job.run.name} is stopped: POST /rl/v1/runs/{job.run.id}/start first",
                code="run_stopped",
            )
        job.asked_at = time.monotonic()
        if not job.ready.is_set() and job.wanted_at is None:
            job.wanted_at = job.asked_at
            self._changed.set()

    async def _wait(self, job: Job) -> None:
        account = job.run.account
        all_of = [j for j in self.by_id.values() if j.waiting]
        own = sum(j.waiting for j in all_of if j.run.account == account)
        if own >= _MAX_WAITING // 2 or sum(j.waiting for j in all_of) >= _MAX_WAITING:
            raise self._not_ready(job)
        job.waiting += 1
        limit = asyncio.timeout(0.0 if self._draining else self._config.hold)
        self._limits.add(limit)
        try:
            async with limit:
                await job.ready.wait()
        except TimeoutError:
            raise self._not_ready(job) from None
        finally:
            self._limits.discard(limit)
            job.waiting -= 1
        self._ask(job)

    def stop_waiting(self) -> None:
        """Answer the requests that wait for a run, also those to come."""
        self._draining = True
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())

    def _not_ready(self, job: Job) -> ServiceUnavailable:
        message = f"the run {job.run.name} cannot answer yet: {self.reason(job)}; try again"
        if job.state == "failed":
            again = max(1.0, job.retry_at - time.monotonic())
            return ServiceUnavailable(message, code="run_failed", retry_after=again)
        state, again = ("queued", 15.0) if job.state == "idle" else ("starting", 5.0)
        details = {"state": state, "run": job.run.id, "position": job.position}
        return RunNotReady(message, code=f"run_{state}", retry_after=again, details=details)

    def reason(self, job: Job) -> str:
        """Return in words why a run does not answer requests, or that it does."""
        if job.run.wish != "serve":
            return "it is being removed" if job.run.wish == "delete" else "its owner stopped it"
        if job.state == "failed":
            again = max(0.0, job.retry_at - time.monotonic())
            return f"{job.note}; it is started again in {again:.0f} s"
        if job.state == "idle" and job.wanted_at is not None:
            taken = sum(j.state in ("starting", "running", "stopping") for j in self.by_id.values())
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

    # -- processes -----------------------------------------------------------------------------

    async def keep(self) -> None:
        """Start and stop runs until it is cancelled; then end all of them."""
        try:
            for run in [run for run in self._store.runs.values() if run.wish == "delete"]:
                # A crash came between.
                await self.delete(run)
            while True:
                now = time.monotonic()
                todo = plan(self.by_id.values(), now, self._rules)
                for job in self.by_id.values():
                    job.position = 0
                for position, job in enumerate(todo.queue, 1):
                    job.position = position
                for job in todo.start:
                    self._begin(job)
                for job in todo.stop:
                    self._stop(job)
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.05, todo.again_at - now)):
                        await self._changed.wait()
                self._changed.clear()
        finally:
            await self._end_all()

    def _begin(self, job: Job) -> None:
        job.state, job.position = "starting", 0
        job.ended.clear()
        job.leaves.clear()
        task = self._tasks[job.run.id] = asyncio.create_task(self._serve(job))
        task.add_done_callback(lambda _: self._tasks.pop(job.run.id, None))

    def _stop(self, job: Job) -> None:
        """Let a run finish the requests and the step under way, and end."""
        log.info("run %s (%s) stops", job.run.id, job.run.name)
        job.state = "stopping"
        job.ready.clear()
        job.leaves.set()

    async def _serve(self, job: Job) -> None:
        """Start a run's service and wait for its end."""
        problem = ""
        try:
            await self._in_thread(lambda: self._start(job))
            problem = await self._until_ended(job)
        except AnyAgentError as error:
            problem = error.message
        except OSError as error:
            problem = f"it cannot be started: {error.strerror}"
        finally:
            await asyncio.shield(self._in_thread(lambda: self._clean_up(job)))
            self._ended(job, problem)

    def _ended(self, job: Job, problem: str) -> None:
        now = time.monotonic()
        job.ready.clear()
        asked = job.waiting > 0 and not job.ends
        job.wanted_at = now if asked else None
        job.state = "idle"
        if problem and not job.ends:
            pause = min(_FIRST_PAUSE * 2**job.failures, _LONGEST_PAUSE)
            job.failures += 1
            job.state, job.note, job.retry_at = "failed", problem, now + pause
            log.error(
                "run %s (%s): %s (log: %s)", job.run.id, job.run.name, problem, self.log_of(job.run)
            )
        job.ended.set()
        self._changed.set()

    def _start(self, job: Job) -> None:
        run = job.run
        make_shared_folder(job.dir.path.parent)
        make_folder(job.dir.path)
        self._write_keys(job)
        job.kept = keep(_HOST)
        port = port_of(job.kept)
        job.origin = url_of(_HOST, port)
        own = {
            "root": str(self._config.root.absolute()),
            "user": run.account,
            "experiment": run.experiment,
            "trial": run.trial,
            "server.host": _HOST,
            "server.port": port,
            "server.public_url": self._public_url,
            "server.lane_tag": run.id,
            "server.ui": False,
        }
        settings = self._config.run_settings(run.model, run.preset, run.settings, own)
        path = self._settings_of(run)
        write_atomic(path, yaml.safe_dump(settings, sort_keys=False))
        command = Command(
            [*PROGRAM, "--config", str(path)],
            secrets={ADMIN_KEY_VARIABLE: secrets.token_hex(24)},
        )
        log_file = self.log_of(run)
        if log_file.exists() and log_file.stat().st_size > _MAX_LOG:
            log_file.replace(log_file.with_suffix(".log.1"))
        job.process = SupervisedProcess(f"run {run.id}", command, log_file)
        log.info("run %s (%s) starts", run.id, run.name)
        job.process.start()

    async def _until_ended(self, job: Job) -> str:
        """Wait for a run's end; return what went wrong, "" if nothing did."""
        process, first = job.process, asyncio.FIRST_COMPLETED
        assert process is not None
        async with _exit_of(process.pid) as exited:
            ended = asyncio.create_task(exited.wait())
            leaves = asyncio.create_task(job.leaves.wait())
            ready = asyncio.create_task(self._until_ready(job))
            try:
                within = self._config.start_timeout
                await asyncio.wait({ended, leaves, ready}, timeout=within, return_when=first)
                if not (ended.done() or leaves.done() or ready.done()):
                    return f"it was not ready after {within:g} s"
                await asyncio.wait({ended, leaves}, return_when=first)
                if not ended.done():
                    process.drain()
                    await asyncio.wait({ended}, timeout=self._config.stop_timeout)
            finally:
                for task in (ended, leaves, ready):
                    task.cancel()
        if job.leaves.is_set():
            return ""
        code = process.poll()
        return f"its service ended with code {code}" if code else ""

    async def _until_ready(self, job: Job) -> None:
        while True:
            with suppress(NeverSent, AnyAgentError):
                answer = await self._upstream.send(
                    "GET", job.origin, "/readyz", CIMultiDict(), None
                )
                async with answer:
                    await answer.read()
                    if answer.status == 200:
                        break
            await asyncio.sleep(_READY_EVERY)
        if job.state == "starting":
            log.info("run %s (%s) is ready", job.run.id, job.run.name)
            job.state, job.failures, job.wanted_at = "running", 0, None
            job.started_at = time.monotonic()
            job.ready.set()
            self._changed.set()

    def _clean_up(self, job: Job) -> None:
        if job.process is not None:
            job.process.stop(grace=0)
            job.process = None
        if job.kept is not None:
            job.kept.close()
            job.kept = None

    async def _end_all(self) -> None:
        """Let every run finish its step, and wait for their ends."""
        for job in self.by_id.values():
            if job.state in ("starting", "running"):
                self._stop(job)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=self._config.stop_timeout + 10)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)


@asynccontextmanager
async def _exit_of(pid: int) -> AsyncIterator[asyncio.Event]:
    """Yield an event that is set when a process has ended."""
    exited = asyncio.Event()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        exited.set()
        yield exited
        return
    except OSError as error:
        raise StartupError(f"the run's process cannot be watched: {error.strerror}") from None
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, exited.set)
    try:
        yield exited
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
