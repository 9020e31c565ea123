"""``<trial>/keys.json``: the keys that operators create for themselves, trainers and tenants.

Keys are stored as hashes; a key's text is shown once, when it is created. Writers take a lock, so
that none of two concurrent changes is lost; readers see the file before a change or after it.
"""

from __future__ import annotations

import fcntl
import hmac
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from any_agent.config import NAME_PATTERN, Name
from any_agent.errors import ConfigError, NotFound, StartupError
from any_agent.keys import key_id, new_key, secret_hash
from any_agent.runtime.atomic_files import make_folder, make_shared_folder, write_atomic
from any_agent.runtime.boot_clock import boot_seconds
from any_agent.runtime.file_owner import own_file, require_own_folder, secret_file

KeptScope = Literal["admin", "trainer", "tenant"]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TenantLimits(_Model):
    """The limits of one tenant over the whole service; None: the service's settings."""

    open_sessions: Annotated[int, Field(ge=1)] | None = None
    requests_per_second: Rate | None = None
    tokens_per_second: Rate | None = None


class StoredKey(_Model):
    """One stored key. Times are seconds since 1970."""

    id: str
    scope: KeptScope
    tenant: Name | None = None
    hash: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the key's text, in hexadecimal digits."""
    limits: TenantLimits = TenantLimits()
    created_at: float
    created_by: str = ""
    """The account that created it."""
    expires_at: float | None = None
    revoked_at: float | None = None

    @model_validator(mode="after")
    def _check_tenant(self) -> StoredKey:
        if (self.scope == "tenant") != (self.tenant is not None):
            raise ValueError("a key of scope tenant, and no other, must name its tenant")
        return self

    def state(self, now: float) -> Literal["live", "revoked", "expired"]:
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and now >= self.expires_at else "live"

    def matches(self, key: str) -> bool:
        return hmac.compare_digest(bytes.fromhex(self.hash), secret_hash(key))


_DEADLINES: dict[tuple[str, float], float] = {}
"""The end of each key that this process has seen, on the boot clock."""


def _is_live(key: StoredKey) -> bool:
    if key.expires_at is None:
        return key.revoked_at is None
    return key.revoked_at is None and boot_seconds() < _DEADLINES[key.id, key.expires_at]


class StoredKeys(_Model):
    """The content of the file: all keys at one moment."""

    format: Literal[1] = 1
    keys: tuple[StoredKey, ...] = ()

    def model_post_init(self, _: object) -> None:
        # Seen now: a wall clock that is set later neither ends a key nor revives it.
        for key in self.keys:
            if key.expires_at is not None:
                left = key.expires_at - time.time()
                _DEADLINES.setdefault((key.id, key.expires_at), boot_seconds() + left)

    @cached_property
    def by_id(self) -> dict[str, StoredKey]:
        return {key.id: key for key in self.keys}

    def find(self, text: str) -> StoredKey | None:
        """Return the live key with this text; None without one."""
        key = self.by_id.get(key_id(text) or "")
        return key if key is not None and key.matches(text) and _is_live(key) else None

    @property
    def has_admin(self) -> bool:
        """True if there is a live admin key."""
        return any(map(_is_live, self._admins))

    @cached_property
    def wants_admin(self) -> bool:
        """True if there is an admin key that is not revoked: its expiry opens nothing."""
        return bool(self._admins)

    @cached_property
    def _admins(self) -> tuple[StoredKey, ...]:
        return tuple(k for k in self.keys if k.scope == "admin" and k.revoked_at is None)

    @cached_property
    def limits(self) -> dict[str, TenantLimits]:
        """The limits by tenant: each limit is that of the tenant's newest key which has one.

        Revoked keys count only for a tenant without any other key: its sessions go on.
        """
        out: dict[str, TenantLimits] = {}
        used = {key.tenant for key in self.keys if key.revoked_at is None}
        for key in self.keys:
            if key.tenant is not None and (key.revoked_at is None or key.tenant not in used):
                earlier = out.get(key.tenant, TenantLimits())
                out[key.tenant] = earlier.model_copy(
                    update=key.limits.model_dump(exclude_none=True)
                )
        return out


def parse_keys(content: bytes) -> StoredKeys:
    """Parse the content of the file; ValueError for anything else."""
    try:
        return StoredKeys.model_validate_json(content)
    except ValidationError as error:
        # The message leaves out the input, which holds hashes of secrets.
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def read_keys(path: Path) -> StoredKeys:
    """Return the keys, none without a file; StartupError for a damaged file, ConfigError for one of
    another user's."""
    try:
        with open(path, "rb", opener=secret_file) as file:
            content = file.read()
    except FileNotFoundError:
        return StoredKeys()
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from None
    try:
        return parse_keys(content)
    except ValueError as error:
        raise StartupError(
            f"{path} is no file of keys ({error}): restore an earlier copy, or delete it, which "
            "makes every key in it invalid"
        ) from None


def create_key(
    path: Path,
    scope: KeptScope,
    *,
    tenant: str | None = None,
    limits: TenantLimits | None = None,
    expires_in: float | None = None,
    created_by: str = "",
    record: Callable[[StoredKey], None] = lambda _: None,
) -> tuple[str, StoredKey]:
    """Create a key and store its hash; return its text, which is stored nowhere, and its record.

    ``record`` is called with the record before the key becomes valid, such as to audit it.
    """
    if scope == "tenant" and tenant is None:
        raise ConfigError("a tenant's key needs the tenant's name: --tenant NAME")
    if tenant is not None and re.fullmatch(NAME_PATTERN, tenant) is None:
        raise ConfigError(
            f"--tenant {tenant[:80]!r} is no valid name: give up to 64 letters, digits, dots, "
            "underscores and hyphens, beginning with a letter or a digit"
        )
    if scope != "tenant" and (tenant is not None or limits not in (None, TenantLimits())):
        raise ConfigError("only a key of scope tenant can have a tenant and limits")
    now = time.time()
    with _locked_keys(path) as stored:
        text, id = new_key(scope)
        while id in stored.by_id:
            text, id = new_key(scope)
        key = StoredKey(
            id=id,
            scope=scope,
            tenant=tenant,
            hash=secret_hash(text).hex(),
            limits=limits or TenantLimits(),
            created_at=now,
            created_by=created_by,
            expires_at=None if expires_in is None else now + expires_in,
        )
        record(key)
        _write_keys(path, (*stored.keys, key))
    return text, key


def revoke_key(
    path: Path, id: str, *, record: Callable[[StoredKey], None] = lambda _: None
) -> tuple[StoredKey, bool]:
    """Revoke a key for good; return it, and True unless it was revoked before. NotFound for an
    unknown id."""
    with _locked_keys(path) as stored:
        key = stored.by_id.get(id)
        if key is None:
            # At most the length of an id: the text may be a key.
            raise NotFound(
                f"there is no key {id[:8]!r}; `any-agent keys list` shows the existing ones"
            )
        if key.revoked_at is not None:
            return key, False
        key = key.model_copy(update={"revoked_at": time.time()})
        record(key)
        _write_keys(path, tuple(key if k.id == id else k for k in stored.keys))
    return key, True


@contextmanager
def _locked_keys(path: Path) -> Iterator[StoredKeys]:
    with locked(path):
        yield read_keys(path)


def _write_keys(path: Path, keys: tuple[StoredKey, ...]) -> None:
    content = StoredKeys(keys=keys).model_dump_json(indent=1, exclude_none=True)
    write_atomic(path, content + "\n")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file, and the files beside it, against other writers."""
    make_shared_folder(path.parent.parent)
    make_folder(path.parent)
    require_own_folder(path.parent)
    with open(path.with_name(f"{path.name}.lock"), "a", opener=own_file) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
