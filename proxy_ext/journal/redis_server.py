"""The Redis server of a journal's log: its address, and what it promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis
from redis._parsers import Encoder
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from any_agent.errors import AnyAgentError, ConfigError, StartupError
from any_agent.runtime.redis_client import FAILURES, is_cluster, open_client, without_password

_ANSWER_SECONDS = 2.0  # after which a command counts as unanswered
_CONNECT_SECONDS = 1.0
_OLDEST = (7, 0)
_COPIED_BYTES = 6000  # up to which parts of a command are sent as one


@dataclass(frozen=True, slots=True)
class LogOptions:
    """A rank's log: the server's URL, the log's name in it, and what it must promise."""

    server: str
    name: str
    lease: float
    """Seconds after which another process may carry on a rank whose process is silent."""
    durability: str
    """`always`, or `everysec`: the operator accepts the loss of a second."""
    replicas: int
    """Number of replicas that must have a commit before it is acknowledged."""


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of a rank's journal."""

    file: Path
    """On the machine's own disk."""
    snapshots: Path
    """Their folder, which all machines see."""
    note: Path
    """Names the file's last home, for the case that the server loses it."""


def options_of(url: str) -> tuple[LogOptions, Places]:
    """Return what a journal's URL has; `RunDir.logged_journal_url` makes it."""
    q = {name: values[-1] for name, values in parse_qs(urlsplit(url).query).items()}
    lease, replicas = float(q["lease"]), int(q["replicas"])
    options = LogOptions(q["server"], q["name"], lease, q["durability"], replicas)
    return options, Places(*(Path(q[name]) for name in ("file", "snapshots", "note")))


def connect(url: str, check: ServerCheck) -> redis.Redis:
    """Return a client of the server, Sentinel's master or cluster at a URL.

    It connects on use, and uses no connection of which the check fails.
    """
    options: dict[str, Any] = {
        "redis_connect_func": check,
        "socket_timeout": _ANSWER_SECONDS,
        "socket_connect_timeout": _CONNECT_SECONDS,
        # Nothing must be sent twice by itself.
        "retry": Retry(NoBackoff(), 0),
        # That of hiredis copies a commit, which takes longer than to send it.
        "command_packer": PythonRespSerializer(
            _COPIED_BYTES,
            Encoder("utf-8", "strict", False).encode,  # type: ignore[no-untyped-call]
        ),
    }
    if is_cluster(url):
        del options["command_packer"]
    try:
        return open_client(url, options)
    except FAILURES as error:
        raise _unusable(url, error) from error


class BrokenPromise(RedisError):
    """A server that answers, but promises less than the configuration asks for."""

    def __init__(self, refusal: AnyAgentError) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class ServerCheck:
    """Checks what a server promises, on each new connection: a failover may bring another one.

    So no command reaches a server that was not checked since it started.
    """

    def __init__(self, options: LogOptions) -> None:
        self._options = options
        self.promise = ""
        """The last server's promise, in words."""
        self.replicas = 0
        """Number of replicas that it had."""

    def __call__(self, connection: Any) -> None:
        """Set the connection up; BrokenPromise for a server that must not have the log."""
        cluster = is_cluster(self._options.server)
        if not cluster:  # whose client has done it
            connection.on_connect()
        connection.send_command("INFO")
        found = _text(connection.read_response())
        info = dict(line.split(":", 1) for line in found.splitlines() if ":" in line)
        try:
            _require_version(info, self._options)
            self.promise = _promise(info, _settings(connection), self._options)
            self.replicas = int(info.get("connected_slaves", 0))
        except AnyAgentError as refusal:
            raise BrokenPromise(refusal) from refusal
        except (KeyError, ValueError) as error:
            # Any other error would leave the connection in use.
            raise RedisError(f"its answers cannot be understood ({error!r})") from error

    def first(self, client: redis.Redis) -> str:
        """Return in words what the server promises, at the start.

        Raises:
            StartupError: it does not answer, is too old, or refuses the login.
            ConfigError: it promises less than the configuration asks for.
        """
        options = self._options
        where = without_password(options.server)
        try:
            client.ping()
        except FAILURES as error:
            raise _unusable(options.server, error) from error
        if options.replicas and is_cluster(options.server):
            raise ConfigError(
                "server.journal_replicas cannot be promised by a cluster, which counts the "
                "replicas of all its masters: leave it at 0"
            )
        # Later on, each append waits for their answers.
        if self.replicas < options.replicas:
            raise ConfigError(
                f"server.journal_replicas is {options.replicas}, and {where} has {self.replicas} "
                "replicas"
            )
        return self.promise


def _require_version(info: Mapping[str, str], options: LogOptions) -> None:
    found = info["redis_version"]
    if tuple(int(n) for n in found.split(".")[:2]) < _OLDEST:
        where = without_password(options.server)
        raise StartupError(f"{where} is Redis {found}: the journal needs 7.0 or later")


def _promise(info: Mapping[str, str], settings: Mapping[str, str], options: LogOptions) -> str:
    where = without_password(options.server)
    # A cluster's replica passes writes on to its master.
    if info.get("role") == "slave" and not is_cluster(options.server):
        raise ConfigError(f"server.journal: {where} is a read-only replica; give its master's URL")
    fsync = settings.get("appendfsync")
    aof = info.get("aof_enabled") == "1"
    known = f"appendonly {'yes' if aof else 'no'}, appendfsync {fsync or 'unknown'}"
    if not aof:
        raise ConfigError(
            f"server.journal: {where} keeps nothing over its own end ({known}): set appendonly yes "
            "and appendfsync always in its configuration"
        )
    if fsync != "always" and options.durability == "always":
        raise ConfigError(
            f"server.journal: {where} may lose its last second ({known}): set appendfsync "
            "always in its configuration, or accept the loss: server.journal_durability: everysec"
        )
    if settings.get("maxmemory-policy", "").startswith("allkeys"):
        raise ConfigError(
            f"server.journal: {where} may evict any key (maxmemory-policy "
            f"{settings['maxmemory-policy']}): set maxmemory-policy noeviction in its configuration"
        )
    promise = "on the server's disk" if fsync == "always" else "up to a second later on its disk"
    copies = f" and on {options.replicas} replicas" if options.replicas else ""
    return (
        f"each commit is {promise}{copies} before it is acknowledged ({known}, "
        f"min-replicas-to-write {settings.get('min-replicas-to-write', 'unknown')}, "
        f"Redis {info['redis_version']})"
    )


def _settings(connection: Any) -> dict[str, str]:
    try:
        connection.send_command(
            "CONFIG", "GET", "appendfsync", "min-replicas-to-write", "maxmemory-policy"
        )
        found = connection.read_response()
    except ResponseError:
        return {}  # a managed server, or a login that may not ask
    pairs = found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
    return {_text(name): _text(value) for name, value in pairs}


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _unusable(url: str, error: Exception) -> AnyAgentError:
    where = without_password(url)
    for found in (error, error.__cause__):  # a cluster's client has the cause there
        if isinstance(found, BrokenPromise):
            return found.refusal
    if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
        return StartupError(f"{where} refuses the login of server.journal: {error}")
    return StartupError(f"the journal's Redis at {where} cannot be used: {error}; is it running?")
