"""The accounts of a cloud and their keys, hashed, in `keys.json`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr

from any_agent.auth.access import ADMIN, NOBODY, Caller, Scope
from any_agent.auth.key_store import (
    StoredKey,
    StoredKeys,
    TenantLimits,
    create_key,
    read_keys,
    revoke_key,
)
from any_agent.errors import NotFound, Unauthenticated
from any_agent.keys import SecretHash

T = TypeVar("T")


class Accounts:
    """The accounts: the tenants of the stored keys.

    This process alone changes the file, so the copy in memory is what it holds. Raises StartupError
    for a damaged file.
    """

    def __init__(self, path: Path, admin_key: SecretStr) -> None:
        self._path = path
        self._admin = SecretHash(admin_key.get_secret_value())
        self._take(read_keys(path))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="accounts")

    def caller(self, key: str) -> Caller:
        """Return the holder of a key ("" for none); Unauthenticated for a wrong one."""
        if not key:
            return NOBODY
        if self._admin.matches(key):
            return ADMIN
        found = self._stored.find(key)
        if found is None:
            raise Unauthenticated("this key is not valid here")
        name = f"account {found.tenant} (key {found.id})"
        return Caller(Scope.TENANT, name, tenant=found.tenant, identity=f"key {found.id}")

    def key(self, id: str) -> StoredKey | None:
        """Return a key by its id, a revoked one too."""
        return self._stored.by_id.get(id)

    def keys_of(self, account: str) -> list[StoredKey]:
        """Return an account's keys, revoked ones too, by which its runs know whom they refuse."""
        return [key for key in self._stored.keys if key.tenant == account]

    def _take(self, stored: StoredKeys) -> None:
        self._stored = stored
        self.names = frozenset(
            key.tenant for key in stored.keys if key.revoked_at is None and key.tenant is not None
        )
        """The accounts that have a key which is not revoked."""

    async def create_key(
        self, account: str, limits: TenantLimits, record: Callable[[StoredKey], None]
    ) -> tuple[str, StoredKey]:
        """Create a key of an account, which need not exist, and return its text and its record.

        ``record`` is called in another thread before the key is valid.
        """
        own: dict[str, Any] = {"tenant": account, "limits": limits, "created_by": "admin"}
        return await self._change(lambda: create_key(self._path, "tenant", **own, record=record))

    async def revoke(self, account: str, id: str) -> StoredKey:
        """Revoke a key; NotFound for one that is not this account's."""
        if all(key.id != id for key in self.keys_of(account)):
            raise NotFound(f"the account {account[:80]!r} has no key {id[:8]!r}")
        key, _ = await self._change(lambda: revoke_key(self._path, id))
        return key

    async def _change(self, change: Callable[[], T]) -> T:
        def act() -> tuple[T, StoredKeys]:
            return change(), read_keys(self._path)

        async def copied() -> T:
            loop = asyncio.get_running_loop()
            made, stored = await loop.run_in_executor(self._thread, act)
            self._take(stored)
            return made

        # Shielded: a client that leaves must not leave the copy behind the file.
        return await asyncio.shield(asyncio.ensure_future(copied()))

    def close(self) -> None:
        self._thread.shutdown(wait=False)


def key_view(key: StoredKey) -> dict[str, Any]:
    """Return what may be shown of a key."""
    shown = key.model_dump(mode="json", exclude={"hash", "scope", "created_by"})
    return {"account": shown.pop("tenant"), **shown}
