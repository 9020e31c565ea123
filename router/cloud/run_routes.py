"""The routes of runs, and the run that a request means."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from any_agent.auth.access import Caller, Scope
from any_agent.config.base import Name
from any_agent.config.cloud import CloudConfig
from any_agent.config.load import settings_of
from any_agent.errors import (
    ConfigError,
    Conflict,
    InvalidRequest,
    NotFound,
    TooManyRequests,
    Unauthenticated,
)
from any_agent.keys import TAG_DIGITS, lane_in, rank_of_session, tag_of_session
from any_agent.rundir.layout import latest_step, read_json
from router.cloud.accounts import Accounts
from router.cloud.asked import Act, Asked
from router.cloud.job import Job, state_of
from router.cloud.jobs import Jobs
from router.cloud.store import Run, RunStore, Wish


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


class RunRoutes:
    """Answers what is about runs, and finds the run of a request."""

    def __init__(
        self,
        config: CloudConfig,
        accounts: Accounts,
        store: RunStore,
        jobs: Jobs,
        making: defaultdict[str, asyncio.Lock],
        public_url: str,
    ) -> None:
        """``making``: by account, a lock, so that of two runs with one name only one is made."""
        self._config = config
        self._accounts = accounts
        self._store = store
        self._jobs = jobs
        self._making = making
        self._public_url = public_url
        one = "/rl/v1/runs/([^/]+)"
        self.table: tuple[tuple[str, str, Act], ...] = (
            ("POST", "/rl/v1/runs", self._create),
            ("GET", "/rl/v1/runs", self._list),
            ("GET", one, self._show),
            ("DELETE", one, self._delete),
            ("POST", f"{one}/start", self._start),
            ("POST", f"{one}/stop", self._stop),
        )

    async def _create(self, asked: Asked) -> tuple[int, Any]:
        account = asked.account
        new = asked.parsed(NewRun)
        async with self._making[account]:
            run, made = await self._made(account, new, asked)
        view = await self._view(self._jobs.by_id[run.id], run, asked.caller)
        return (201 if made else 200), view

    async def _made(self, account: str, new: NewRun, asked: Asked | None) -> tuple[Run, bool]:
        """Make a run, with the answer to its request, or return the one of this name if it is the
        same."""
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
        names = (account, new.experiment, trial)
        run = Run(self._store.free_id(), *names, model, preset, new.settings)
        job = Job(run, self._config)
        answer = None
        if asked is not None:
            answer = asked.answer(201, await self._view(job, run, asked.caller))
        await self._jobs.add(job, answer)
        return run, True

    def _free_trial(self, account: str, experiment: str) -> str:
        names = (f"trial-{number}" for number in range(1, 1_000_000))
        return next(n for n in names if self._store.named(account, experiment, n) is None)

    # -- the run of a request ------------------------------------------------------------------

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

    def job_of_session(self, account: str, session_id: str) -> Job | None:
        """Return the run of a session by its id or key; None for a text that is neither, which any
        run refuses.

        NotFound for an id of no run of the account, or of one that it does not name: ids of AReaL's
        form do not.
        """
        lane = lane_in(session_id)
        tag = tag_of_session(session_id) if lane is None else lane.id[:TAG_DIGITS]
        if tag is not None:
            job = self._jobs.by_id.get(tag)
            if job is None or job.account != account or job.run.wish == "delete":
                # As a rank says it, whoever's the run is.
                raise NotFound(
                    "there is no session of that name; check the key or id",
                    code="session_not_found",
                )
            return job
        runs = self._store.of_account(account)
        if rank_of_session(session_id) is None or len(runs) < 2:
            return None
        raise NotFound(
            f"the id {session_id[:80]} does not say of which of your {len(runs)} runs it is: put "
            f"the run into the URL, {self._public_url}/runs/EXPERIMENT/TRIAL/..., or send the "
            "session's own key",
            code="run_not_named",
        )

    async def default_job(self, account: str) -> Job:
        """Return the newest run of an account that is not stopped, else the newest one.

        An account without a run gets the cloud's default one; NotFound (`no_run`) without that.
        """
        default = self._config.default
        if not self._store.of_account(account) and default is not None:
            # All of it is done, also if its client leaves meanwhile.
            await asyncio.shield(
                asyncio.create_task(self._make_default(account, default.experiment))
            )
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
                await self._made(account, NewRun(experiment=experiment), None)

    # -- views and wishes ----------------------------------------------------------------------

    async def _list(self, asked: Asked) -> tuple[int, Any]:
        account = asked.caller.tenant
        jobs = [j for j in self._jobs.by_id.values() if account in (None, j.run.account)]
        jobs.sort(key=lambda job: job.run.created_at)
        return 200, {"runs": [await self._view(job, job.run, asked.caller) for job in jobs]}

    async def _show(self, asked: Asked, id: str) -> tuple[int, Any]:
        job = self._job(asked.caller, id)
        return 200, await self._view(job, job.run, asked.caller)

    async def _delete(self, asked: Asked, id: str) -> tuple[int, Any]:
        return await self._wish(asked, id, "delete")

    async def _start(self, asked: Asked, id: str) -> tuple[int, Any]:
        return await self._wish(asked, id, "serve")

    async def _stop(self, asked: Asked, id: str) -> tuple[int, Any]:
        return await self._wish(asked, id, "stop")

    async def _wish(self, asked: Asked, id: str, wish: Wish) -> tuple[int, Any]:
        job = self._job(asked.caller, id)
        view = await self._view(job, replace(job.run, wish=wish), asked.caller)
        await self._jobs.change(job, wish, asked.answer(202, view))
        return 202, view

    def _job(self, caller: Caller, id: str) -> Job:
        """Return a run that the caller may see; another account's is not there for it."""
        job = self._jobs.by_id.get(id)
        if job is None or caller.tenant not in (None, job.run.account):
            raise NotFound(f"there is no run {id[:80]!r}", code="unknown_run")
        return job

    async def _view(self, job: Job, run: Run, caller: Caller) -> dict[str, Any]:
        """Return what a caller sees of a job, as it is with this wish of its owner."""
        operator = caller.scope is Scope.ADMIN
        view: dict[str, Any] = {
            "id": run.id,
            "account": run.account,
            "experiment": run.experiment,
            "trial": run.trial,
            "model": run.model,
            "preset": run.preset,
            "settings": run.settings,
            "state": state_of(job, run),
            "reason": self._jobs.reason(job, run, operator=operator),
            "position": (job.position or None) if run.wish == "serve" else None,
            "created_at": run.created_at,
            "base_url": f"{self._public_url}/runs/{run.experiment}/{run.trial}/v1",
            **await asyncio.to_thread(_progress, job),
        }
        if operator:
            view |= {"folder": str(job.dir.path), "log": str(self._jobs.log_of(run))}
        return view


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
