"""The routes of accounts and runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from any_agent.auth.access import Caller, Scope
from any_agent.auth.key_store import TenantLimits
from any_agent.config.base import NAME_PATTERN, Name
from any_agent.config.cloud import CloudConfig
from any_agent.config.load import settings_of
from any_agent.errors import (
    ConfigError,
    Conflict,
    Forbidden,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    TooManyRequests,
    Unauthenticated,
)
from any_agent.rundir.layout import latest_step, read_json
from router.body import RequestBody, json_object
from router.client_response import ClientResponder
from router.cloud.accounts import Accounts, key_view
from router.cloud.jobs import Job, Jobs
from router.cloud.store import Run, RunStore, Wish

Handler: TypeAlias = Callable[[web.BaseRequest, RequestBody, Caller], Awaitable[web.StreamResponse]]
_Act: TypeAlias = Callable[..., Coroutine[Any, Any, tuple[int, Any]]]
Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")

_MAX_BODY = 65_536
_ROOTS = ("/rl/v1/accounts", "/rl/v1/account", "/rl/v1/runs")


class NewAccount(TenantLimits):
    """The body of `POST /rl/v1/accounts`: a name, and limits of each of its runs."""

    name: Name


class NewRun(BaseModel):
    """The body of `POST /rl/v1/runs`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: Name
    trial: Name | None = None
    """None: `trial-1`, `trial-2`, ..., the first that is free."""
    model: str | None = None
    """None: that of the cloud's default run."""
    preset: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict, max_length=100)
    """Settings of the run by dotted names, those that the cloud lets accounts set."""


class OwnRoutes:
    """Answers what is not for one of the runs."""

    def __init__(
        self,
        config: CloudConfig,
        accounts: Accounts,
        store: RunStore,
        jobs: Jobs,
        replies: ClientResponder,
        public_url: str,
    ) -> None:
        self._config = config
        self._accounts = accounts
        self._store = store
        self._jobs = jobs
        self._replies = replies
        self._public_url = public_url.rstrip("/")
        self._making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By account: of two runs with one name only one is made."""
        self._acting: set[asyncio.Task[Any]] = set()
        self._table: list[tuple[str, re.Pattern[str], _Act]] = [
            ("POST", re.compile("/rl/v1/accounts"), self._create_account),
            ("GET", re.compile("/rl/v1/accounts"), self._list_accounts),
            ("DELETE", re.compile("/rl/v1/accounts/([^/]+)"), self._delete_account),
            ("POST", re.compile("/rl/v1/accounts/([^/]+)/keys"), self._create_key),
            ("DELETE", re.compile("/rl/v1/accounts/([^/]+)/keys/([^/]+)"), self._revoke_key),
            ("GET", re.compile("/rl/v1/account"), self._show_account),
            ("POST", re.compile("/rl/v1/runs"), self._create_run),
            ("GET", re.compile("/rl/v1/runs"), self._list_runs),
            ("GET", re.compile("/rl/v1/runs/([^/]+)"), self._show_run),
            ("DELETE", re.compile("/rl/v1/runs/([^/]+)"), self._delete_run),
            ("POST", re.compile("/rl/v1/runs/([^/]+)/start"), self._start_run),
            ("POST", re.compile("/rl/v1/runs/([^/]+)/stop"), self._stop_run),
        ]

    def find(self, method: str, path: str) -> Handler | None:
        """Return the handler of a path that is one of these; None for the path of a run's route.

        NotFound or MethodNotAllowed for one below these that has none.
        """
        if not any(path == root or path.startswith(f"{root}/") for root in _ROOTS):
            return None
        allowed = []
        for of_method, pattern, act in self._table:
            if match := pattern.fullmatch(path):
                allowed.append(of_method)
                if of_method == method:
                    return self._handler(act, match.groups())
        if allowed:
            raise MethodNotAllowed.of(method, path[:200], allowed)
        raise NotFound(f"there is no route {path[:200]}")

    def _handler(self, act: _Act, named: tuple[str, ...]) -> Handler:
        async def handle(
            request: web.BaseRequest, body: RequestBody, caller: Caller
        ) -> web.StreamResponse:
            acting = act(caller, await body.read(_MAX_BODY), *named)
            status, data = await self._whole(acting)
            return await self._replies.json(request, data, status=status)

        return handle

    async def _whole(self, acting: Coroutine[Any, Any, T]) -> T:
        """Do all of a change, also if its client leaves meanwhile."""
        task = asyncio.create_task(acting)
        self._acting.add(task)
        task.add_done_callback(self._acting.discard)
        return await asyncio.shield(task)

    def health(self) -> dict[str, Any]:
        """Return that the process lives, and how many places are taken."""
        jobs = self._jobs.by_id.values()
        taken = sum(job.takes_place for job in jobs)
        queued = sum(job.position > 0 for job in jobs)
        return {
            "status": "ok",
            "places": self._config.places,
            "taken": taken,
            "queued": queued,
        }

    # -- accounts ------------------------------------------------------------------------------

    async def _create_account(self, caller: Caller, content: bytes) -> tuple[int, Any]:
        _require_operator(caller)
        body = _parsed(NewAccount, content)
        async with self._making[body.name]:
            if self._exists(body.name):
                raise Conflict(
                    f"there is an account {body.name}: POST /rl/v1/accounts/{body.name}/keys makes "
                    "another key of it",
                    code="account_exists",
                )
            if self._store.removing(body.name):
                raise Conflict(
                    f"the account {body.name} is being removed; try again", code="account_removing"
                )
            return 201, await self._new_key(body.name, body)

    async def _create_key(self, caller: Caller, content: bytes, name: str) -> tuple[int, Any]:
        _require_operator(caller)
        self._require_account(name)
        body = _parsed(TenantLimits, content)
        return 201, await self._new_key(name, body)

    async def _new_key(self, account: str, limits: TenantLimits) -> dict[str, Any]:
        given = TenantLimits(**limits.model_dump(include=set(TenantLimits.model_fields)))
        text, key = await self._accounts.create_key(account, given)
        await self._jobs.write_keys(account)
        return {**key_view(key), "api_key": text, "base_url": f"{self._public_url}/v1"}

    async def _revoke_key(self, caller: Caller, _: bytes, name: str, id: str) -> tuple[int, Any]:
        _require_operator(caller)
        key = await self._accounts.revoke(name, id)
        await self._jobs.write_keys(name)
        return 200, key_view(key)

    async def _list_accounts(self, caller: Caller, _: bytes) -> tuple[int, Any]:
        _require_operator(caller)
        names = {*self._accounts.names, *(run.account for run in self._store.runs.values())}
        return 200, {"accounts": [self._account_view(name) for name in sorted(names)]}

    async def _show_account(self, caller: Caller, _: bytes) -> tuple[int, Any]:
        if caller.tenant is None:
            raise Forbidden("this route is an account's own; the operator has /rl/v1/accounts")
        return 200, self._account_view(caller.tenant)

    async def _delete_account(self, caller: Caller, _: bytes, name: str) -> tuple[int, Any]:
        _require_operator(caller)
        self._require_account(name)
        # No run is made meanwhile. Each part may be repeated, if this is cut off.
        async with self._making[name]:
            jobs = self._jobs.of_account(name)
            for job in jobs:
                await self._jobs.change(job, "delete")
            for key in self._accounts.keys_of(name):
                if key.revoked_at is None:
                    await self._accounts.revoke(name, key.id)
        return 202, {"account": name, "state": "deleting", "runs": len(jobs)}

    def _exists(self, name: str) -> bool:
        """Return whether an account has a key, or a run: its last key may have been revoked."""
        return name in self._accounts.names or bool(self._store.of_account(name))

    def _account_view(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "keys": [key_view(key) for key in self._accounts.keys_of(name)],
            "runs": len(self._store.of_account(name)),
            "runs_limit": self._config.runs_per_account,
        }

    def _require_account(self, name: str) -> None:
        if not self._exists(name):
            raise NotFound(f"there is no account {name[:80]!r}", code="unknown_account")

    # -- runs ----------------------------------------------------------------------------------

    async def _create_run(self, caller: Caller, content: bytes) -> tuple[int, Any]:
        account = _account_of(caller)
        new = _parsed(NewRun, content)
        async with self._making[account]:
            run, made = await self._made(account, new)
        return (201 if made else 200), await self._view(self._jobs.by_id[run.id], caller)

    async def _made(self, account: str, new: NewRun) -> tuple[Run, bool]:
        """Make a run, or return the one of this name if it is the same."""
        default = self._config.default
        model = new.model or (default.model if default else None)
        preset = new.preset or (default.preset if default else None)
        if model is None or preset is None:
            raise InvalidRequest("name a model and a preset: this service has no default ones")
        settings = self._config.run_settings(model, preset, new.settings, {})
        if account not in self._accounts.names:
            # It was removed meanwhile.
            raise Unauthenticated("this key is not valid here")
        trial = new.trial or self._free_trial(account, new.experiment)
        found = self._store.named(account, new.experiment, trial)
        if found is not None:
            if found.wish != "delete" and (found.model, found.preset, found.settings) == (
                model,
                preset,
                new.settings,
            ):
                return found, False
            raise Conflict(
                f"there is a run {new.experiment}/{trial} with other settings, or it is being "
                "removed: choose another trial",
                code="run_exists",
            )
        try:
            await asyncio.to_thread(settings_of, settings)
        except ConfigError as error:
            raise InvalidRequest(error.message, code="bad_settings", param="settings") from None
        if len(self._store.of_account(account)) >= self._config.runs_per_account:
            raise TooManyRequests(
                f"an account has at most {self._config.runs_per_account} runs: delete one",
                code="quota_exceeded",
            )
        id = self._store.free_id()
        run = Run(id, account, new.experiment, trial, model, preset, new.settings)
        await self._jobs.add(run)
        return run, True

    def _free_trial(self, account: str, experiment: str) -> str:
        names = (f"trial-{number}" for number in range(1, 1_000_000))
        return next(n for n in names if self._store.named(account, experiment, n) is None)

    def job_named(self, account: str, experiment: str, trial: str) -> Job:
        """Return an account's run by its name; NotFound (`unknown_run`) without one."""
        if (job := self._present(account, experiment, trial)) is None:
            raise NotFound(
                f"the account {account} has no run {experiment[:80]}/{trial[:80]}",
                code="unknown_run",
            )
        return job

    def job_of_model(self, account: str, model: Any) -> Job | None:
        """Return the run that a call's model names, as `EXPERIMENT/TRIAL`, or with the account
        before it; None for any other name: agents hard-code many."""
        names = model.split("/") if isinstance(model, str) else []
        if len(names) == 3 and names[0] == account:
            del names[0]
        return self._present(account, *names) if len(names) == 2 else None

    def _present(self, account: str, experiment: str, trial: str) -> Job | None:
        run = self._store.named(account, experiment, trial)
        return None if run is None or run.wish == "delete" else self._jobs.by_id[run.id]

    async def default_job(self, account: str) -> Job:
        """Return the newest run of an account that is not stopped, else the newest one.

        An account without a run gets the cloud's default one; NotFound (`no_run`) without that.
        """
        if not self._store.of_account(account) and self._config.default is not None:
            await self._whole(self._make_default(account, self._config.default.experiment))
        runs = self._store.of_account(account)
        if not runs:
            raise NotFound(
                "this account has no run: POST /rl/v1/runs makes one",
                code="no_run",
            )
        serving = [run for run in runs if run.wish == "serve"]
        return self._jobs.by_id[(serving or runs)[-1].id]

    async def _make_default(self, account: str, experiment: str) -> None:
        async with self._making[account]:
            if not self._store.of_account(account):
                await self._made(account, NewRun(experiment=experiment))

    async def _list_runs(self, caller: Caller, _: bytes) -> tuple[int, Any]:
        account = caller.tenant
        jobs = [j for j in self._jobs.by_id.values() if account in (None, j.run.account)]
        jobs.sort(key=lambda job: job.run.created_at)
        return 200, {"runs": [await self._view(job, caller) for job in jobs]}

    async def _show_run(self, caller: Caller, _: bytes, id: str) -> tuple[int, Any]:
        return 200, await self._view(self._job(caller, id), caller)

    async def _delete_run(self, caller: Caller, _: bytes, id: str) -> tuple[int, Any]:
        return await self._wish(caller, id, "delete")

    async def _start_run(self, caller: Caller, _: bytes, id: str) -> tuple[int, Any]:
        return await self._wish(caller, id, "serve")

    async def _stop_run(self, caller: Caller, _: bytes, id: str) -> tuple[int, Any]:
        return await self._wish(caller, id, "stop")

    async def _wish(self, caller: Caller, id: str, wish: Wish) -> tuple[int, Any]:
        job = self._job(caller, id)
        await self._jobs.change(job, wish)
        return 202, await self._view(job, caller)

    def _job(self, caller: Caller, id: str) -> Job:
        """Return a run that the caller may see; another account's is not there for it."""
        job = self._jobs.by_id.get(id)
        if job is None or caller.tenant not in (None, job.run.account):
            raise NotFound(f"there is no run {id[:80]!r}", code="unknown_run")
        return job

    async def _view(self, job: Job, caller: Caller) -> dict[str, Any]:
        run = job.run
        view: dict[str, Any] = {
            "id": run.id,
            "account": run.account,
            "experiment": run.experiment,
            "trial": run.trial,
            "model": run.model,
            "preset": run.preset,
            "settings": run.settings,
            "state": _state(job),
            "reason": self._jobs.reason(job),
            "position": job.position or None,
            "created_at": run.created_at,
            "base_url": f"{self._public_url}/runs/{run.experiment}/{run.trial}/v1",
            **await asyncio.to_thread(_progress, job),
        }
        if caller.scope is Scope.ADMIN:
            view |= {"folder": str(job.dir.path), "log": str(self._jobs.log_of(run))}
        return view


def _state(job: Job) -> str:
    if job.run.wish == "delete":
        return "deleting"
    if job.run.wish == "stop":
        return "stopping" if job.state != "idle" else "stopped"
    return "queued" if job.position else job.state


def _progress(job: Job) -> dict[str, Any]:
    """Return what a run's folder says of its training."""
    state: dict[str, Any] = {}
    with contextlib.suppress(OSError, json.JSONDecodeError):
        state = read_json(job.dir.state, {})
    steps = state.get("versions", {"0": 0}).values()
    return {
        "version": state.get("highest_version", 0),
        "steps": max(steps, default=0),
        "checkpoint_step": latest_step(job.dir.checkpoints),
    }


def _require_operator(caller: Caller) -> None:
    if caller.scope is not Scope.ADMIN:
        raise Forbidden("this route needs the operator's key")


def _account_of(caller: Caller) -> str:
    if caller.tenant is None:
        raise Forbidden("a run is an account's: this route needs an account's key")
    return caller.tenant


def _parsed(kind: type[Body], content: bytes) -> Body:
    data = json_object(content)
    if data is None:
        raise InvalidRequest("the body must be a JSON object")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        message = first["msg"].replace(f"^{NAME_PATTERN}$", NAME_PATTERN)
        raise InvalidRequest(f"{name}: {message}", param=name or None) from None
