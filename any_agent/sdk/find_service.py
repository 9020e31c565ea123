"""Which service the SDK talks to, with which key, and its connections there."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from weakref import WeakKeyDictionary

from any_agent.client.aiohttp_transport import AiohttpTransport
from any_agent.client.environment import PLACEHOLDER_KEY, is_placeholder
from any_agent.client.rl_client import RLClient
from any_agent.client.service_url import UrlFile, checked_url, names_file, url_file
from any_agent.errors import ConfigError
from any_agent.keys import SESSION_KEY_PREFIX

_URLS = ("ANY_AGENT_URL", "OPENAI_BASE_URL")
_TIMEOUT = 60.0
"""Seconds for an answer, beyond what a request asks to wait."""
_PATIENCE = 60.0
_MOVING_TIMEOUT = 900.0
"""Seconds: a scheduler that stops a run starts it again after some minutes."""
_KEYS = ("ANY_AGENT_API_KEY", "OPENAI_API_KEY")
_KEY = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where a service is, and the key that opens sessions there (None: it needs none)."""

    named: str
    """Its URL without `/v1`; or that of a file that holds it, ``file:///shared/run/url``."""
    api_key: str | None = field(default=None, repr=False)
    url_from: str = field(default="url", compare=False)
    """What named it: the argument, or a variable of the environment."""
    key_from: str | None = field(default=None, compare=False)
    """What gave the key."""

    @property
    def url(self) -> str:
        """Where it is now, without `/v1`; while nobody has said where, the file's URL."""
        if self.file is None:
            return self.named
        return self.file.now() or self.named

    @property
    def patience(self) -> float:
        """Seconds to try again while it is away, where nobody says so."""
        return _PATIENCE if self.file is None else _MOVING_TIMEOUT

    @property
    def file(self) -> UrlFile | None:
        """What says where it is, if a file does."""
        return url_file(self.named, self.url_from) if names_file(self.named) else None


def find_service(
    url: str | None = None,
    api_key: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> ServiceAddress:
    """The arguments, else `ANY_AGENT_URL` and `ANY_AGENT_API_KEY`, else `OPENAI_BASE_URL` and
    `OPENAI_API_KEY`, each by itself; with or without `/v1`. ``file:///shared/run/url`` names a file
    that holds the URL, as long as the service is there: it may move, and come later.

    ConfigError if nothing names a service, for what is no URL, and for a key that is a session's.
    """
    environ = os.environ if environ is None else environ
    found, url_from = _first("url", url, _URLS, environ)
    if found is None:
        raise ConfigError(
            "no service is named: pass url=, or set ANY_AGENT_URL (or OPENAI_BASE_URL) to what "
            "`any-agent serve` or `any-agent train` prints, like http://127.0.0.1:8000"
        )
    key, key_from = _first("api_key", api_key, _KEYS, environ)
    # As it is read from files, with the end of its line.
    key = (key or "").strip() or None
    if key == PLACEHOLDER_KEY:
        key = None
    if key is not None and key.startswith(SESSION_KEY_PREFIX):
        raise ConfigError(
            f"{key_from} is the key of one session, which cannot open others: give a tenant's key "
            "(any-agent keys create --scope tenant). Inside of `any-agent run` the process is a "
            "session already: make calls, and open none"
        )
    if key is not None and not _KEY.fullmatch(key):
        raise ConfigError(
            f"{key_from} is no key: it holds white space, or other characters that no key has"
        )
    found = found.strip()
    if names_file(found):
        url_file(found, url_from).read()
    else:
        found = checked_url(found, url_from)
    return ServiceAddress(found, key, url_from, key_from if key else None)


def service_of_options(url: str | None, key_file: str | None) -> ServiceAddress:
    """What ``--url`` and ``--api-key-file`` name, else the environment; ConfigError names them.

    A key is no option itself: everybody on a machine can read those."""
    if _first("url", url, _URLS, os.environ)[0] is None:
        raise ConfigError(
            "no service is named: give --url, or set ANY_AGENT_URL (or OPENAI_BASE_URL), to what "
            "`any-agent serve` or `any-agent train` prints, like http://127.0.0.1:8000"
        )
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
    """What is given first, and by what."""
    if given:
        return given, argument
    for name in names:
        value = environ.get(name)
        if value and not is_placeholder(value):
            return value, name
    return None, argument


# -- connections -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Shared:
    client: RLClient
    users: int = 0


_clients: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[ServiceAddress, float], _Shared]
] = WeakKeyDictionary()
_lock = threading.Lock()


def borrow_client(service: ServiceAddress, *, retry_for: float) -> RLClient:
    """The running event loop's client of a service: all its sessions share the connections.

    Give it back with :func:`return_client`; the last one closes it.
    """
    with _lock:
        of_loop = _clients.setdefault(asyncio.get_running_loop(), {})
    shared = of_loop.get((service, retry_for))
    if shared is None:
        client = RLClient(
            service.named,
            admin_key=service.api_key,
            retry_for=retry_for,
            http=AiohttpTransport(timeout=_TIMEOUT, bounded=True, trust_env=True),
            timeout=_TIMEOUT,
        )
        shared = of_loop[service, retry_for] = _Shared(client)
    shared.users += 1
    return shared.client


async def return_client(service: ServiceAddress, *, retry_for: float) -> None:
    """What was borrowed on this event loop with the same arguments."""
    of_loop = _clients[asyncio.get_running_loop()]
    shared = of_loop[service, retry_for]
    shared.users -= 1
    if not shared.users:
        del of_loop[service, retry_for]
        await shared.client.close()


@asynccontextmanager
async def borrowed(service: ServiceAddress, *, retry_for: float) -> AsyncIterator[RLClient]:
    """The same, for as long as the block takes."""
    client = borrow_client(service, retry_for=retry_for)
    try:
        yield client
    finally:
        await return_client(service, retry_for=retry_for)


def _in_child() -> None:
    """A forked process has no thread that would let the lock go."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_in_child)
