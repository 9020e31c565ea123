"""Who may do what: the keys of one run, where they come from, and what each is good for."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from any_agent.auth.key_store import StoredKeys, TenantLimits, parse_keys, read_keys
from any_agent.config import LOOPBACK, Config
from any_agent.errors import ConfigError, Forbidden, StartupError, Unauthenticated
from any_agent.keys import (
    KEPT_PREFIXES,
    PLACEHOLDER_SESSION,
    SESSION_KEY_PREFIX,
    KeySigner,
    SecretHash,
)
from any_agent.rundir.layout import RunDir, parse_secrets
from any_agent.runtime.file_watcher import WatchedFile


class Scope(StrEnum):
    """What a key is good for; ``none`` is a request without one."""

    ADMIN = "admin"
    TRAINER = "trainer"
    TENANT = "tenant"
    SESSION = "session"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    scope: Scope
    name: str
    """What is recorded as who: "admin", "tenant alice (key 3f9a12cd)", "session", "anyone"."""
    tenant: str | None = None
    identity: str = ""
    """The same for every request of one key, and for no other's: "admin", a key's id, a lane's."""


ANYONE = Caller(Scope.ADMIN, "anyone", identity="anyone")
"""Everybody, where there is no admin key."""
ADMIN = Caller(Scope.ADMIN, "admin", identity="admin")
RUN = Caller(Scope.TRAINER, "the run", identity="run")
"""The run's own trainer and router."""
NOBODY = Caller(Scope.NONE, "nobody")

_NOT_VALID = "this session key is not valid here"
_PLACEHOLDER = (
    "this URL names no session: make the client with base_url of run's arguments, or set "
    "rollout.agent.mode=subproc for an agent that reads OPENAI_BASE_URL"
)

CLIENT_HEADER = "X-Any-Agent-Client"
"""From which address a request came to the router; whatever a client put there is replaced."""
METRICS_SCOPES = frozenset({Scope.ADMIN, Scope.TRAINER})
"""Who may read metrics, at every part of a run."""


def authorize(scopes: Set[Scope], caller: Caller) -> None:
    """Unauthenticated without a key, Forbidden with one that is good for other routes."""
    if caller.scope in scopes:
        return
    needed = " or ".join(sorted(scopes - {Scope.NONE}))
    if caller.scope is Scope.NONE:
        raise Unauthenticated(
            f"this route needs a key (scope {needed}): Authorization: Bearer <key>"
        )
    raise Forbidden(f"a key of scope {caller.scope} cannot use this route, which needs {needed}")


def run_dir_of(config: Config) -> RunDir:
    names = (config.user, config.experiment, config.trial)
    return RunDir.of(config.root, *names, config.server.journal_dir)


def signer_of(run_dir: RunDir) -> KeySigner:
    """What signs and verifies a run's session keys; it learns of rotated secrets while it runs."""
    now = tuple(run_dir.signing_secrets())
    watched = WatchedFile(run_dir.secret, lambda content: tuple(parse_secrets(content)), now)
    return KeySigner(lambda within: watched.get(within=within))


def require_key(config: Config, host: str) -> None:
    """ConfigError for an address that others reach while there is no admin key anywhere.

    StartupError for keys that cannot be read, before anything slow begins.
    """
    kept = read_keys(run_dir_of(config).keys)
    if host not in LOOPBACK and config.server.admin_key is None and not kept.has_admin:
        raise ConfigError(
            f"{host} is reachable from outside, so server.admin_key must be set "
            "(ANY_AGENT_SERVER__ADMIN_KEY), or a key of scope admin made (any-agent keys create "
            "--scope admin); without one only 127.0.0.1 may be bound"
        )


def is_open(config: Config) -> bool:
    """Whether a service that starts now is open to everybody on its machine."""
    server = config.server
    closed = server.admin_key is not None or server.host not in LOOPBACK
    return not closed and not read_keys(run_dir_of(config).keys).wants_admin


class Access:
    """The keys of one run: the configured one, the kept ones, and those that are derived."""

    def __init__(self, config: Config, *, signer: KeySigner | None = None) -> None:
        run_dir = run_dir_of(config)
        self.signer = signer or signer_of(run_dir)
        admin = config.server.admin_key
        self._admin = SecretHash(admin.get_secret_value()) if admin is not None else None
        try:
            self._kept = WatchedFile(run_dir.keys, parse_keys, StoredKeys())
        except (OSError, ValueError) as error:
            raise StartupError(f"{run_dir.keys} cannot be used: {error}") from None
        self._closed = self._admin is not None or config.server.host not in LOOPBACK

    @property
    def open_mode(self) -> bool:
        """Whether whoever reaches us is the operator: no admin key is anywhere, on loopback.

        The first admin key ends it, and while this process lives it does not come back. One that
        has expired keeps it ended.
        """
        if not self._closed and self._kept.get().wants_admin:
            self._closed = True
        return not self._closed

    def look(self) -> None:
        """Look for changes of `keys.json`: what is wrong with it is told, also if nobody asks."""
        self._kept.get()

    def caller(self, bearer: str) -> Caller:
        """Who holds this key, "" for none; Unauthenticated for one that is not valid here."""
        if bearer.startswith(SESSION_KEY_PREFIX):
            lane = self.signer.verify(bearer)
            if lane is None:
                raise Unauthenticated(_PLACEHOLDER if bearer == PLACEHOLDER_SESSION else _NOT_VALID)
            return Caller(Scope.SESSION, "session", identity=f"lane {lane.id}")
        if bearer.startswith(KEPT_PREFIXES):
            return self._kept_caller(bearer)
        if self.open_mode:
            return ANYONE
        if not bearer:
            return NOBODY
        if self._admin is None or not self._admin.matches(bearer):
            raise Unauthenticated("this key is not valid here")
        return ADMIN

    def limits(self, tenant: str) -> TenantLimits | None:
        """What a tenant's keys allow it; None where they say nothing."""
        return self._kept.get().limits.get(tenant)

    def _kept_caller(self, key: str) -> Caller:
        if self.signer.is_run_key(key):
            return RUN
        # A new key is good at once.
        found = self._kept.get().find(key) or self._kept.get(within=0.0).find(key)
        if found is None:
            raise Unauthenticated("this key is not valid here")
        who = f"tenant {found.tenant}" if found.tenant is not None else found.scope
        name = f"{who} (key {found.id})"
        return Caller(Scope(found.scope), name, tenant=found.tenant, identity=f"key {found.id}")
