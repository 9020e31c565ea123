"""The cloud: one URL at which each account's requests go to its runs, which it starts for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from aiohttp import hdrs, web
from multidict import CIMultiDict

from any_agent.auth.access import METRICS_SCOPES, Caller, Scope, authorize
from any_agent.auth.audit_log import AuditLog
from any_agent.completions.apis import api_at
from any_agent.config.base import NAME_PATTERN
from any_agent.config.cloud import CloudConfig
from any_agent.errors import (
    Forbidden,
    ReplyLost,
    ServiceUnavailable,
    SessionMismatch,
    StartupError,
    Unauthenticated,
)
from any_agent.keys import (
    JUDGE_KEY_PREFIX,
    LANE_KEY_PREFIXES,
    SESSION_KEY_PREFIX,
    TAG_DIGITS,
    key_id,
    lane_in,
    session_prefix,
)
from any_agent.rundir.layout import locked
from any_agent.runtime.atomic_files import make_folder, make_shared_folder
from any_agent.runtime.file_owner import own_file, require_own_entries, require_own_folder
from any_agent.runtime.logs import Redactor
from any_agent.runtime.metrics import CONTENT_TYPE, Exposition
from any_agent.runtime.request_limits import Reservation
from router.affinity import SESSION_HEADER, SESSIONS_PATH, key_in
from router.areal import AREAL_START
from router.body import RequestBody, json_object
from router.cloud.accounts import Accounts
from router.cloud.asked import Answers
from router.cloud.budgets import Budgets
from router.cloud.job import Job
from router.cloud.jobs import Jobs
from router.cloud.launching import Launching
from router.cloud.metering import Metering
from router.cloud.metrics import of_cloud
from router.cloud.routes import OwnRoutes
from router.cloud.store import RunStore
from router.entrance import Entrance, listening
from router.metrics import of_entrance
from router.open_session import START
from router.upstream import NeverSent, Upstream, end_to_end, open_upstream

log = logging.getLogger(__name__)

FOLDER = ".cloud"
"""The cloud's own folder in `root`; no account can have this name."""
_LAST_ANSWERS = 2.0
"""Seconds that answers have to reach their clients once all runs have ended."""
_REDACTOR = Redactor()
_FREE = ("/rl/", "/export_trajectories")
"""Paths to which an account may post whose budget is used up, but for opens."""
_NAMED_RUN = re.compile(rf"/runs/({NAME_PATTERN})/({NAME_PATTERN})(/.*)")
"""`/runs/EXPERIMENT/TRIAL/...`: a request for this run of the key's account."""


@dataclass(frozen=True, slots=True)
class _Destination:
    """The run that a request is for, its target there, and its body if it was read."""

    job: Job
    target: str
    content: bytes | None = None


class Cloud(Entrance):
    """Answers the routes of accounts and runs, and passes every other request on to its run."""

    def __init__(
        self,
        config: CloudConfig,
        accounts: Accounts,
        store: RunStore,
        jobs: Jobs,
        metering: Metering,
        budgets: Budgets,
        answers: Answers,
        upstream: Upstream,
        audit: AuditLog,
        public_url: str,
    ) -> None:
        server = config.server
        super().__init__(max_body_bytes=server.max_body_bytes, client_timeout=server.client_timeout)
        self._bounds = server.of_run()
        self._accounts = accounts
        self._jobs = jobs
        self._budgets = budgets
        self._upstream = upstream
        self._audit = audit
        self._routes = OwnRoutes(
            *(config, accounts, store, jobs, metering, budgets, answers, self.replies),
            public_url,
        )

    async def answer(
        self, request: web.BaseRequest, reservation: Reservation
    ) -> web.StreamResponse:
        body = RequestBody(request, self._bounds, reservation)
        path = request.raw_path.partition("?")[0]
        if path in ("/", "/healthz", "/readyz"):
            return await self.replies.json(request, self._routes.health())
        key = key_in(request.headers)
        try:
            if path == "/metrics" and request.method == "GET":
                authorize(METRICS_SCOPES, self._caller(key, reservation))
                return await self._show_metrics(request)
            handler = self._routes.find(request.method, path)
            if handler is not None:
                caller = self._caller(key, reservation)
                response = await handler(request, body, caller)
                if request.method != "GET":
                    self._audit.use(who=caller.name, route=f"{request.method} {path[:200]}")
                return response
            to = await self._destination(request, path, key, body, reservation)
            if _spends(request.method, to.target):
                self._budgets.require(to.job.account)
        except (Unauthenticated, Forbidden) as error:
            route = _REDACTOR.text(path)[:200]
            self._audit.refusal(error.code, route=route, claimed=key_id(key))
            raise
        return await self._pass_on(request, body, to)

    async def _show_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        readings = [*of_entrance(self.stats, "cloud"), *of_cloud(self._jobs)]
        body = Exposition("cloud", lambda: readings).render()
        head = CIMultiDict({hdrs.CONTENT_TYPE: CONTENT_TYPE, hdrs.CONTENT_LENGTH: str(len(body))})
        return await self.replies.send(request, 200, head, body)

    async def drain(self, within: float) -> None:
        """Refuse new requests, and wait until the runs have ended, up to ``within`` seconds."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                await self._jobs.drain()
        await super().drain(_LAST_ANSWERS)

    def _caller(self, key: str, reservation: Reservation) -> Caller:
        """Return the holder of an account's or the operator's key."""
        caller = self._accounts.caller(key)
        if caller.scope is Scope.NONE:
            raise Unauthenticated("this route needs an account's key: Authorization: Bearer <key>")
        if caller.scope is Scope.TENANT:
            reservation.charge_to(f"account {caller.tenant}")
        return caller

    async def _destination(
        self,
        request: web.BaseRequest,
        path: str,
        key: str,
        body: RequestBody,
        reservation: Reservation,
    ) -> _Destination:
        """Return the run that a request is for."""
        target, named = request.raw_path, None
        if match := _NAMED_RUN.fullmatch(path):
            named, path = (match[1], match[2]), match[3]
            target = "/" + target.split("/", 4)[4]
        session = session_prefix(unquote(path)) or key
        if not session.startswith(LANE_KEY_PREFIXES):
            session = request.headers.get(SESSION_HEADER, "")
        if session.startswith(LANE_KEY_PREFIXES):
            job = self._job_of_session(session)
            reservation.charge_to(f"account {job.run.account}")
            if named not in (None, (job.run.experiment, job.run.trial)):
                raise Forbidden("this session is not one of the run that the URL names")
            return _Destination(job, target)
        caller = self._caller(key, reservation)
        if caller.tenant is None:
            raise Forbidden(
                "the operator's key is for accounts and runs; calls need an account's key"
            )
        if named is not None:
            return _Destination(self._routes.runs.job_named(caller.tenant, *named), target)
        content: bytes | None = None
        sessions = _named_sessions(request, path)
        if request.method == "POST" and (api_at(path) is not None or path.startswith("/rl/")):
            content = await body.read()
            fields = json_object(content) or {}
            if api_at(path) is not None:
                meant = self._routes.runs.job_of_model(caller.tenant, fields.get("model"))
                if meant is not None:
                    return _Destination(meant, target, content)
            else:
                names = (fields.get("session_id"), fields.get("api_key"))
                sessions += [name for name in names if isinstance(name, str)]
        jobs = [self._routes.runs.job_of_session(caller.tenant, name) for name in sessions]
        found = {job.run.id: job for job in jobs if job is not None}
        if len(found) > 1:
            raise SessionMismatch("the request names sessions of different runs")
        job = next(iter(found.values()), None) or await self._routes.runs.default_job(caller.tenant)
        return _Destination(job, target, content)

    def _job_of_session(self, key: str) -> Job:
        """Return the run that a session's or a judge's key is of; Unauthenticated for a wrong key.

        It is checked here: a forged one must not start a run.
        """
        lane = lane_in(key)
        job = self._jobs.by_id.get(lane.id[:TAG_DIGITS]) if lane is not None else None
        judge = key.startswith(JUDGE_KEY_PREFIX)
        if (
            job is None
            or not job.knows(key, JUDGE_KEY_PREFIX if judge else SESSION_KEY_PREFIX)
            # A run does not go on for an account whose keys are all revoked.
            or job.account not in self._accounts.names
        ):
            raise Unauthenticated("this session key is not valid here")
        return job

    async def _pass_on(
        self, request: web.BaseRequest, body: RequestBody, to: _Destination
    ) -> web.StreamResponse:
        job, headers = to.job, end_to_end(request.headers)
        headers.popall(hdrs.EXPECT, None)
        # Before the run is used: a client that takes its time to send a body keeps no place.
        content = await body.to_send(headers, to.content)
        async with self._jobs.using(job) as origin:
            payload = body.stream() if content is None else content or None
            try:
                response = await self._upstream.send(
                    request.method, origin, to.target, headers, payload
                )
            except NeverSent:
                raise ServiceUnavailable(
                    f"the run {job.run.name} does not answer just now; try again", retry_after=2
                ) from None
            except ReplyLost:
                if body.error is not None:
                    raise body.error from None
                raise
            async with response:
                response.headers["x-any-agent-experiment"] = job.run.experiment
                response.headers["x-any-agent-trial"] = job.run.trial
                return await self.replies.relay(request, response)


def _named_sessions(request: web.BaseRequest, path: str) -> list[str]:
    """Return the ids of sessions that a request of an account's key has in its head."""
    names = [*request.headers.getall(SESSION_HEADER, ())]
    if (prefix := session_prefix(unquote(path))) is not None:
        names.append(prefix)
    if path.startswith(SESSIONS_PATH):
        names.append(unquote(path[len(SESSIONS_PATH) :]).partition("/")[0])
    return [*names, *request.query.getall("session_id", ())]


def _spends(method: str, target: str) -> bool:
    """Return whether a request calls a model or opens a session: a POST that is no reward or end,
    and an open by any method."""
    path = unquote(target.partition("?")[0])
    if (prefix := session_prefix(path)) is not None:
        path = path[len(prefix) + 1 :]
        # As a rank does: clients put `/rl` behind the session's base URL.
        if path.startswith("/v1/rl/"):
            path = path.removeprefix("/v1")
    return path in (START, AREAL_START) or (method == "POST" and not path.startswith(_FREE))


@asynccontextmanager
async def running_cloud(
    config: CloudConfig, listener: socket.socket, public_url: str
) -> AsyncIterator[Cloud]:
    """Serve accounts and their runs on a bound socket until the context ends."""
    make_shared_folder(config.root)
    folder = config.root.absolute() / FOLDER
    make_folder(folder)
    async with AsyncExitStack() as stack:
        stack.enter_context(_alone(folder))
        store = await RunStore.open(folder)
        stack.push_async_callback(store.close)
        accounts = Accounts(folder / "keys.json", config.admin_key)
        stack.callback(accounts.close)
        upstream = await stack.enter_async_context(open_upstream())
        audit = AuditLog(folder / "audit.jsonl")
        stack.push_async_callback(asyncio.to_thread, audit.close)
        launching = Launching(config, folder, upstream, accounts.keys_of, public_url)
        stack.callback(launching.close)
        metering = Metering(store)
        jobs = Jobs(config, store, launching, metering, folder)
        budgets = Budgets(config, store, metering, jobs)
        await budgets.load()
        for keeping in map(asyncio.create_task, (metering.keep(), jobs.keep(), budgets.keep())):
            keeping.add_done_callback(_end_if_failed)
            stack.push_async_callback(_end, keeping)
        answers = await Answers.open(store)
        cloud = Cloud(
            *(config, accounts, store, jobs, metering, budgets, answers, upstream, audit),
            public_url,
        )
        await stack.enter_async_context(listening(cloud, listener))
        yield cloud


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; StartupError if another cloud has it."""
    require_own_folder(folder, place="root")
    require_own_entries(folder, place="root")
    with open(folder / "lock", "a", opener=own_file) as file:
        if not locked(file):
            raise StartupError(
                f"another any-agent cloud uses {folder.parent}: stop it, or choose another root"
            )
        yield


def _end_if_failed(task: asyncio.Task[None]) -> None:
    """End the process if a task has failed that keeps runs or their bill: nothing else would."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("runs or their bill are kept no more: the cloud ends", exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
