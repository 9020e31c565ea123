"""The cloud's own routes: of accounts, of runs, of its health."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

import orjson
from aiohttp import web

from any_agent.auth.access import Caller
from any_agent.config.cloud import CloudConfig
from any_agent.errors import MethodNotAllowed, NotFound
from any_agent.protocol.idempotency import REPLAYED
from router.body import RequestBody
from router.client_response import ClientResponder
from router.cloud.account_routes import AccountRoutes
from router.cloud.accounts import Accounts
from router.cloud.asked import Act, Answers
from router.cloud.budgets import Budgets
from router.cloud.jobs import Jobs
from router.cloud.metering import Metering
from router.cloud.run_routes import RunRoutes
from router.cloud.store import RunStore
from router.cloud.usage_routes import UsageRoutes

Handler: TypeAlias = Callable[[web.BaseRequest, RequestBody, Caller], Awaitable[web.StreamResponse]]
_Result: TypeAlias = tuple[int, Any, dict[str, str]]
T = TypeVar("T")

_MAX_BODY = 65_536
_ROOTS = ("/rl/v1/accounts", "/rl/v1/account", "/rl/v1/runs", "/rl/v1/usage")


class OwnRoutes:
    """Answers what is not for one of the runs."""

    def __init__(
        self,
        config: CloudConfig,
        accounts: Accounts,
        store: RunStore,
        jobs: Jobs,
        metering: Metering,
        budgets: Budgets,
        answers: Answers,
        replies: ClientResponder,
        public_url: str,
    ) -> None:
        self._config = config
        self._jobs = jobs
        self._answers = answers
        self._replies = replies
        self._acting: set[asyncio.Task[Any]] = set()
        making: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        url = public_url.rstrip("/")
        self._accounts = AccountRoutes(
            config, accounts, store, jobs, metering, budgets, making, url
        )
        self.runs = RunRoutes(config, accounts, store, jobs, making, url)
        usage = UsageRoutes(jobs, metering)
        table = (*self._accounts.table, *self.runs.table, *usage.table)
        self._table = [(method, re.compile(path), act) for method, path, act in table]

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

    def _handler(self, act: Act, named: tuple[str, ...]) -> Handler:
        async def handle(
            request: web.BaseRequest, body: RequestBody, caller: Caller
        ) -> web.StreamResponse:
            acting = self._act(act, named, request, caller, await body.read(_MAX_BODY))
            status, data, headers = await self._whole(acting)
            return await self._replies.json(request, data, status=status, headers=headers)

        return handle

    async def _act(
        self,
        act: Act,
        named: tuple[str, ...],
        request: web.BaseRequest,
        caller: Caller,
        content: bytes,
    ) -> _Result:
        async with self._answers.asked(request, caller, content) as asked:
            earlier = asked.earlier
            if earlier is not None:
                if earlier.shown_key is None:
                    return earlier.status, orjson.Fragment(earlier.body), {REPLAYED: "true"}
                # Without such a key, what made it was cut off before it had an effect.
                self._accounts.require_not_shown(earlier.shown_key)
            status, data = await act(asked, *named)
            await self._answers.finish(asked, status, data)
            return status, data, {}

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
