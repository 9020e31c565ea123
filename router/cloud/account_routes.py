"""The routes of accounts and of their keys."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from any_agent.auth.key_store import StoredKey, TenantLimits
from any_agent.config.base import Name
from any_agent.config.cloud import Budget, CloudConfig
from any_agent.errors import Conflict, Forbidden, NotFound
from router.cloud.accounts import Accounts, key_view
from router.cloud.asked import Act, Asked
from router.cloud.budgets import Budgets
from router.cloud.jobs import Jobs
from router.cloud.metering import Metering
from router.cloud.store import RunStore


class NewAccount(TenantLimits):
    """The body of `POST /rl/v1/accounts`: a name, limits of each run, and a budget of all."""

    name: Name
    budget: Budget | None = None
    """None: the cloud's."""


class AccountRoutes:
    """Answers what is about accounts, most of it for the operator."""

    def __init__(
        self,
        config: CloudConfig,
        accounts: Accounts,
        store: RunStore,
        jobs: Jobs,
        metering: Metering,
        budgets: Budgets,
        making: defaultdict[str, asyncio.Lock],
        public_url: str,
    ) -> None:
        """``making``: by account, a lock under which its runs are made."""
        self._config = config
        self._accounts = accounts
        self._store = store
        self._jobs = jobs
        self._metering = metering
        self._budgets = budgets
        self._making = making
        self._public_url = public_url
        one = "/rl/v1/accounts/([^/]+)"
        self.table: tuple[tuple[str, str, Act], ...] = (
            ("POST", "/rl/v1/accounts", self._create),
            ("GET", "/rl/v1/accounts", self._list),
            ("DELETE", one, self._delete),
            ("GET", f"{one}/budget", self._show_budget),
            ("PUT", f"{one}/budget", self._set_budget),
            ("DELETE", f"{one}/budget", self._drop_budget),
            ("POST", f"{one}/keys", self._create_key),
            ("DELETE", f"{one}/keys/([^/]+)", self._revoke_key),
            ("GET", "/rl/v1/account", self._show),
        )

    async def _create(self, asked: Asked) -> tuple[int, Any]:
        asked.require_operator()
        body = asked.parsed(NewAccount)
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
            await self._metering.begin_account(body.name)
            await self._budgets.put(body.name, body.budget)
            return 201, await self._new_key(asked, body.name, body)

    async def _show_budget(self, asked: Asked, name: str) -> tuple[int, Any]:
        asked.require_operator()
        self._require(name)
        return 200, await self._budgets.view(name)

    async def _set_budget(self, asked: Asked, name: str) -> tuple[int, Any]:
        asked.require_operator()
        self._require(name)
        await self._budgets.put(name, asked.parsed(Budget))
        return 200, await self._budgets.view(name)

    async def _drop_budget(self, asked: Asked, name: str) -> tuple[int, Any]:
        asked.require_operator()
        self._require(name)
        await self._budgets.put(name, None)
        return 200, await self._budgets.view(name)

    async def _create_key(self, asked: Asked, name: str) -> tuple[int, Any]:
        asked.require_operator()
        self._require(name)
        body = asked.parsed(TenantLimits)
        return 201, await self._new_key(asked, name, body)

    async def _new_key(self, asked: Asked, account: str, limits: TenantLimits) -> dict[str, Any]:
        given = TenantLimits(**limits.model_dump(include=set(TenantLimits.model_fields)))
        text, key = await self._accounts.create_key(account, given, self._recorder(asked))
        await self._jobs.write_keys(account)
        return {**key_view(key), "api_key": text, "base_url": f"{self._public_url}/v1"}

    def _recorder(self, asked: Asked) -> Callable[[StoredKey], None]:
        """Return a function that stores which key a request makes before the key is valid.

        So a repeated request is known to have made it, whatever is killed between. It is called in
        the thread that writes the keys.
        """
        loop = asyncio.get_running_loop()

        def record(key: StoredKey) -> None:
            answer = asked.answer(201, key_view(key), shown_key=key.id)
            if answer is not None:
                asyncio.run_coroutine_threadsafe(self._store.keep(answer), loop).result()

        return record

    def require_not_shown(self, id: str) -> None:
        """Raise Conflict (`key_shown_once`) if there is a key with this id, whose text an earlier
        answer had."""
        key = self._accounts.key(id)
        if key is not None:
            raise Conflict(
                f"this request has made the key {id} of the account {key.tenant}; its text was in "
                "the first answer and is stored nowhere. If that answer was lost, revoke the key "
                f"(DELETE /rl/v1/accounts/{key.tenant}/keys/{id}) and make another one (POST "
                f"/rl/v1/accounts/{key.tenant}/keys with another Idempotency-Key)",
                code="key_shown_once",
                details={"account": key.tenant, "id": id},
            )

    async def _revoke_key(self, asked: Asked, name: str, id: str) -> tuple[int, Any]:
        asked.require_operator()
        key = await self._accounts.revoke(name, id)
        await self._jobs.write_keys(name)
        return 200, key_view(key)

    async def _list(self, asked: Asked) -> tuple[int, Any]:
        asked.require_operator()
        names = {*self._accounts.names, *(run.account for run in self._store.runs.values())}
        return 200, {"accounts": [self._view(name) for name in sorted(names)]}

    async def _show(self, asked: Asked) -> tuple[int, Any]:
        if asked.caller.tenant is None:
            raise Forbidden("this route is an account's own; the operator has /rl/v1/accounts")
        account = asked.caller.tenant
        return 200, {**self._view(account), "budget": await self._budgets.view(account)}

    async def _delete(self, asked: Asked, name: str) -> tuple[int, Any]:
        asked.require_operator()
        if asked.key is None or not self._accounts.keys_of(name):
            # A repeated request may have revoked all keys before, and was killed.
            self._require(name)
        # No run is made meanwhile. Each part may be repeated, if this is cut off.
        async with self._making[name]:
            jobs = self._jobs.of_account(name)
            for job in jobs:
                await self._jobs.change(job, "delete")
            for key in self._accounts.keys_of(name):
                if key.revoked_at is None:
                    await self._accounts.revoke(name, key.id)
            keys = self._accounts.keys_of(name)
            await self._store.forget_answers([f"key {key.id}" for key in keys])
            await self._budgets.put(name, None)
        return 202, {"account": name, "state": "deleting", "runs": len(jobs)}

    def _exists(self, name: str) -> bool:
        """Return whether an account has a key, or a run: its last key may have been revoked."""
        return name in self._accounts.names or bool(self._store.of_account(name))

    def _view(self, name: str) -> dict[str, Any]:
        return {
            "name": name,
            "keys": [key_view(key) for key in self._accounts.keys_of(name)],
            "runs": len(self._store.of_account(name)),
            "runs_limit": self._config.runs_per_account,
        }

    def _require(self, name: str) -> None:
        if not self._exists(name):
            raise NotFound(f"there is no account {name[:80]!r}", code="unknown_account")
