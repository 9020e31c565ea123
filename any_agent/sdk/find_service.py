"""`find_service`: the service and the key that the SDK uses; `shared_client`: its connections."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from any_agent.client.aiohttp_transport import AiohttpTransport
from any_agent.client.environment import PLACEHOLDER_KEY, is_placeholder
from any_agent.client.rl_client import RLClient
from any_agent.client.service_url import UrlFile, checked_url, names_file, url_file
from any_agent.errors import ConfigError
from any_agent.keys import LANE_KEY_PREFIXES, SESSION_KEYS

_URLS = ("ANY_AGENT_URL", "OPENAI_BASE_URL")
_TIMEOUT = 60.0  # seconds for a reply, on top of those that a request asks to wait
_PATIENCE = 60.0
_FIRST_CONTACT = 5.0
"""Seconds for an address of another machine that never answered this process: it may be wrong. One
of this machine gets the usual ones, as its service may be starting in the next terminal."""
_MOVING_PATIENCE = 900.0  # seconds: a scheduler that stops a run starts it again after some minutes
_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """A service's address, and the key that opens sessions there (None: no key is needed)."""

    named: str
    """The service's URL without `/v1`, or the URL of a file with it, ``file:///shared/run/url``."""
    api_key: str | None = field(default=None, repr=False)
    url_from: str = field(default="url", compare=False)
    """The argument or environment variable that named it."""
    key_from: str | None = field(default=None, compare=False)
    """The argument, environment variable or option that gave the key."""

    @property
    def url(self) -> str:
        """The present URL without `/v1`; the file's URL while no address is known."""
        if self.file is None:
            return self.named
        return self.file.now() or self.named

    @property
    def patience(self) -> float:
        """The default of seconds for retries while the service is unreachable."""
        return _PATIENCE if self.file is None else _MOVING_PATIENCE

    @property
    def file(self) -> UrlFile | None:
        """The file that holds the URL; None without one."""
        return url_file(self.named, self.url_from) if names_file(self.named) else None

    @property
    def on_this_machine(self) -> bool:
        """True for a loopback address."""
        host = urlsplit(self.named).hostname or ""
        with suppress(ValueError):
            return ipaddress.ip_address(host).is_loopback
        return host == "localhost"


def find_service(
    url: str | None = None,
    api_key: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServiceAddress:
    """Return the address in the arguments, else in `ANY_AGENT_URL` and `ANY_AGENT_API_KEY`, else in
    `OPENAI_BASE_URL` and `OPENAI_API_KEY`, each by itself; with or without `/v1`.
    ``file:///shared/run/url`` names a file with the URL, which exists while the service runs: the
    service may move, and start later.

    ConfigError if nothing names a service, for an invalid URL, and for a session's key.
    """
    environ = os.environ if environ is None else environ
    found, url_from = _first("url", url, _URLS, environ)
    if found is None:
        raise ConfigError(
            "no service is named: pass url= (commands: --url), or set ANY_AGENT_URL (or "
            "OPENAI_BASE_URL) to the URL that `any-agent serve` or `any-agent train` prints, like "
            "http://127.0.0.1:8000"
        )
    key, key_from = _first("api_key", api_key, SESSION_KEYS, environ)
    # A key from a file may end with a line break.
    key = (key or "").strip() or None
    if key == PLACEHOLDER_KEY:
        key = None
    if key is not None and key.startswith(LANE_KEY_PREFIXES):
        raise ConfigError(
            f"{key_from} is the key of one session, which cannot open others: give a tenant's key "
            "(any-agent keys create --scope tenant). A program of `any-agent run` is in a session "
            "already: it makes calls and opens no session"
        )
    if key is not None and not _KEY.fullmatch(key):
        raise ConfigError(
            f"{key_from} is not a key: it has spaces, or other characters that keys never have"
        )
    found = found.strip()
    if names_file(found):
        url_file(found, url_from).read()
    else:
        found = checked_url(found, url_from)
    return ServiceAddress(found, key, url_from, key_from if key else None)


def service_of_options(url: str | None, key_file: str | None) -> ServiceAddress:
    """Return the address in ``--url`` and ``--api-key-file``, else in the environment; errors name
    these options. No option has the key itself, as all users of a machine can read command lines.
    """
    if key_file is None:
        return find_service(url)
    try:
        key = Path(key_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {key_file} cannot be read: {error}") from None
    if len(key.split()) != 1:
        raise ConfigError(f"--api-key-file {key_file} must hold one key and nothing else")
    return replace(find_service(url, key), key_from="--api-key-file")


def _first(
    argument: str, given: str | None, names: tuple[str, ...], environ: Mapping[str, str]
) -> tuple[str | None, str]:
    """Return the first value that is set, and its source."""
    if given:
        return given, argument
    for name in names:
        value = environ.get(name)
        if value and not is_placeholder(value):
            return value, name
    return None, argument


@dataclass(slots=True)
class _SharedClient:
    client: RLClient
    users: int = 0


_clients: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[ServiceAddress, float | None], _SharedClient]
] = WeakKeyDictionary()
_lock = threading.Lock()


class shared_client:
    """``async with shared_client(service, retry_for=60) as client`` gives the running event loop's
    client of a service: all its users share the connections, and the last one closes it.

    Without ``retry_for`` it is the service's patience, which another machine's URL where nothing
    ever answered does not get: it may be wrong. A file with the URL says that the service comes.
    """

    def __init__(self, service: ServiceAddress, *, retry_for: float | None) -> None:
        self._key = service, retry_for

    async def __aenter__(self) -> RLClient:
        with _lock:
            clients = _clients.setdefault(asyncio.get_running_loop(), {})
        shared = clients.get(self._key)
        if shared is None:
            shared = clients[self._key] = _SharedClient(_new_client(*self._key))
        shared.users += 1
        return shared.client

    async def __aexit__(self, *error: object) -> None:
        clients = _clients[asyncio.get_running_loop()]
        shared = clients[self._key]
        shared.users -= 1
        if not shared.users:
            del clients[self._key]
            await shared.client.close()


def _new_client(service: ServiceAddress, retry_for: float | None) -> RLClient:
    patience = service.patience if retry_for is None else retry_for
    expected = retry_for is not None or service.file is not None or service.on_this_machine
    return RLClient(
        service.named,
        admin_key=service.api_key,
        retry_for=patience,
        first_contact=patience if expected else _FIRST_CONTACT,
        http=AiohttpTransport(timeout=_TIMEOUT, bounded=True, trust_env=True),
        timeout=_TIMEOUT,
    )


def _replace_lock() -> None:
    """Replace the lock: a forked process lacks the thread that may have acquired it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_replace_lock)
