"""The keys of one run, the scope of each, and the guard of a service without an admin key."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from urllib.parse import urlsplit

from any_agent.auth.key_store import StoredKeys, TenantLimits, parse_keys, read_keys
from any_agent.config import LOOPBACK, Config
from any_agent.errors import ConfigError, Forbidden, StartupError, Unauthenticated
from any_agent.keys import (
    JUDGE_KEY_PREFIX,
    KEPT_PREFIXES,
    PLACEHOLDER_SESSION,
    SESSION_KEY_PREFIX,
    KeySigner,
    SecretHash,
)
from any_agent.rundir.layout import RunDir, parse_secrets
from any_agent.runtime.file_watcher import WatchedFile


class Scope(StrEnum):
    """The routes that a key opens; ``none`` is the scope of a request without a key."""

    ADMIN = "admin"
    TRAINER = "trainer"
    TENANT = "tenant"
    SESSION = "session"
    JUDGE = "judge"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    scope: Scope
    name: str
    """The sender's name in records: "admin", "tenant alice (key 3f9a12cd)", "session", "anyone"."""
    tenant: str | None = None
    identity: str = ""
    """An identity that is unique to one key: "admin", or the id of a key or a lane."""
    lane: str | None = None
    """The lane whose newest session the key means, of a session's or a judge's key."""


ANYONE = Caller(Scope.ADMIN, "anyone", identity="anyone")
"""Every caller of a service without an admin key."""
ADMIN = Caller(Scope.ADMIN, "admin", identity="admin")
RUN = Caller(Scope.TRAINER, "the run", identity="run")  # the run's own trainer and router
NOBODY = Caller(Scope.NONE, "nobody")  # A caller without a key

_INVALID_KEY = "this key is not valid here"
_INVALID_SESSION_KEY = "this session key is not valid here"
_PLACEHOLDER = (
    "this URL of OPENAI_BASE_URL names no session: create the client with the base_url that run is "
    "called with, or set rollout.agent.mode=subproc for an agent that reads OPENAI_BASE_URL; a "
    "client of another provider needs that one's base_url"
)

CLIENT_HEADER = "X-Any-Agent-Client"
"""The header in which the router passes a client's address on, signed with the run's secret; a
client's own value is replaced, and not believed by a rank."""
METRICS_SCOPES = frozenset({Scope.ADMIN, Scope.TRAINER})
"""The scopes that may read metrics, at every part of a run."""


def authorize(scopes: Set[Scope], caller: Caller) -> None:
    """Raise Unauthenticated for a caller without a key, Forbidden for a key of other scopes."""
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


def signer_of(run_dir: RunDir, tag: str = "") -> KeySigner:
    """Return the signer of a run's session keys, which follows rotations of the run's secrets.

    ``tag``: the beginning of its lanes, `server.lane_tag`.
    """
    now = tuple(run_dir.signing_secrets())
    watched = WatchedFile(run_dir.secret, lambda content: tuple(parse_secrets(content)), now)
    return KeySigner(lambda within: watched.get(within=within), tag)


def require_key(config: Config, host: str) -> None:
    """Raise ConfigError for a host that other machines reach while there is no admin key.

    Raise StartupError for keys that cannot be read, before anything slow begins.
    """
    stored = read_keys(run_dir_of(config).keys)
    if host not in LOOPBACK and config.server.admin_key is None and not stored.has_admin:
        raise ConfigError(
            f"{host} is reachable from outside, so server.admin_key must be set "
            "(ANY_AGENT_SERVER__ADMIN_KEY), or a key of scope admin created (any-agent keys create "
            "--scope admin --new-trial); without one only 127.0.0.1 may be bound"
        )


def is_open(config: Config) -> bool:
    """Return True if a service that starts now is open to every user of its machine."""
    server = config.server
    closed = server.admin_key is not None or server.host not in LOOPBACK
    return not closed and not read_keys(run_dir_of(config).keys).wants_admin


class Access:
    """The keys of one run: the configured admin key, the stored keys, and the derived ones."""

    def __init__(self, config: Config) -> None:
        run_dir = run_dir_of(config)
        self.signer = signer_of(run_dir, config.server.lane_tag or "")
        admin = config.server.admin_key
        self._admin = SecretHash(admin.get_secret_value()) if admin is not None else None
        try:
            self._stored = WatchedFile(run_dir.keys, parse_keys, StoredKeys())
        except (OSError, ValueError) as error:
            raise StartupError(f"{run_dir.keys} cannot be used: {error}") from None
        self._closed = self._admin is not None or config.server.host not in LOOPBACK

    @property
    def open_mode(self) -> bool:
        """True while every caller counts as the operator: on loopback, without any admin key.

        The first admin key ends this for as long as the process lives, also after the key expires.
        """
        if not self._closed and self._stored.get().wants_admin:
            self._closed = True
        return not self._closed

    def refresh(self) -> None:
        """Check `keys.json` for changes, so that a damaged file is logged without any request."""
        self._stored.get()

    def caller(self, bearer: str) -> Caller:
        """Return the holder of a key ("" for no key); Unauthenticated for an invalid one."""
        if bearer.startswith(SESSION_KEY_PREFIX):
            lane = self.signer.verify(bearer)
            if lane is None:
                placeholder = bearer == PLACEHOLDER_SESSION
                raise Unauthenticated(_PLACEHOLDER if placeholder else _INVALID_SESSION_KEY)
            return Caller(Scope.SESSION, "session", identity=f"lane {lane.id}", lane=lane.id)
        if bearer.startswith(JUDGE_KEY_PREFIX):
            lane = self.signer.verify(bearer, JUDGE_KEY_PREFIX)
            if lane is None:
                raise Unauthenticated(_INVALID_KEY)
            identity = f"judge of lane {lane.id}"
            return Caller(Scope.JUDGE, "judge", identity=identity, lane=lane.id)
        if bearer.startswith(KEPT_PREFIXES):
            return self._stored_caller(bearer)
        if self.open_mode:
            return ANYONE
        if not bearer:
            return NOBODY
        if self._admin is None or not self._admin.matches(bearer):
            raise Unauthenticated(_INVALID_KEY)
        return ADMIN

    def knows(self, bearer: str) -> bool:
        """Return whether `caller` accepts a key, or a request without one."""
        try:
            self.caller(bearer)
        except Unauthenticated:
            return False
        return True

    def limits(self, tenant: str) -> TenantLimits | None:
        """Return the limits that a tenant's keys set; None without any."""
        return self._stored.get().limits.get(tenant)

    def _stored_caller(self, key: str) -> Caller:
        if self.signer.is_run_key(key):
            return RUN
        # A new key is valid at once.
        found = self._stored.get().find(key) or self._stored.get(within=0.0).find(key)
        if found is None:
            raise Unauthenticated(_INVALID_KEY)
        who = f"tenant {found.tenant}" if found.tenant is not None else found.scope
        name = f"{who} (key {found.id})"
        return Caller(Scope(found.scope), name, tenant=found.tenant, identity=f"key {found.id}")


def require_loopback_client(
    *,
    hosts: Iterable[str],
    origins: Iterable[str],
    fetch_sites: Iterable[str],
    key: str = "an admin key",
    do: str = "set server.admin_key",
) -> None:
    """Raise Forbidden unless these values of `Host`, `Origin` and `Sec-Fetch-Site` are those of a
    local program: without a key, a web page in the operator's browser must not be able to call us.

    ``key`` and ``do`` are the words of the error for the key that is missing.
    """
    for site in fetch_sites:
        if site not in ("none", "same-origin"):
            raise Forbidden(f"without {key} no web page is served; {do}")
    for name, values in (("host", hosts), ("origin", origins)):
        for value in values:
            if value and not _is_loopback(value):
                raise Forbidden(
                    f"without {key} only loopback is served, not {name} {value[:80]!r}; {do}"
                )


@lru_cache(maxsize=1024)
def _is_loopback(value: str) -> bool:
    """Return True if a Host or an Origin names this machine; 127.0.0.1.example.org does not."""
    try:
        host = urlsplit(value if "//" in value else f"//{value}").hostname or ""
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
