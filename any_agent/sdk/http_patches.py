"""Patches of HTTP clients that let their requests join the session of the running context.

Each client is patched where it sends one request, below its redirects and its own authentication.
So every hop is judged by its own URL, no header stays on the client's own request, and the key can
reach no other origin. Requests of a session go to the present address of its service, if it has
moved since their client was made.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from any_agent.keys import KEY_HEADERS
from any_agent.sdk.session_context import followed, key_for

log = logging.getLogger(__name__)

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def _httpx_sync(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    def send_single_request(client: Any, request: Any) -> Any:
        joined = _join_httpx(request)
        if joined is request:
            return send(client, request)
        with _report_original(joined, request):
            response = send(client, joined)
        response.request = request
        return response

    return send_single_request


def _httpx_async(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    async def send_single_request(client: Any, request: Any) -> Any:
        joined = _join_httpx(request)
        if joined is request:
            return await send(client, request)
        with _report_original(joined, request):
            response = await send(client, joined)
        response.request = request
        return response

    return send_single_request


def _join_httpx(request: Any) -> Any:
    """Return the request itself, or a copy with the session's key and its service's present URL:
    the request may be sent elsewhere later."""
    url = request.url
    if (to := followed(str(url), request.headers)) is not None:
        url = type(url)(to)
    key = key_for(url.scheme, url.raw_host.decode("ascii"), url.port, url.path, request.headers)
    if key is None and to is None:
        return request
    copy = object.__new__(type(request))
    copy.__dict__.update(request.__dict__)
    copy.headers = request.headers.copy()
    if to is not None:
        copy.url = url
        copy.headers["Host"] = url.netloc.decode("ascii")
    if key is not None:
        _set_key(copy.headers, key)
    return copy


def _requests(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    def send_one(adapter: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        to = followed(request.url, request.headers)
        key = _key_for_requests(to or request.url, request.headers)
        if key is None and to is None:
            return send(adapter, request, *arguments, **named)
        joined = request.copy()
        if to is not None:
            joined.url = to
        if key is not None:
            _set_key(joined.headers, key)
        with _report_original(joined, request):
            response = send(adapter, joined, *arguments, **named)
        response.request = request
        return response

    return send_one


def _key_for_requests(text: str, headers: Any) -> str | None:
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError:
        # The adapter refuses an invalid URL.
        return None
    return key_for(url.scheme, url.hostname, port, url.path, headers)


@contextmanager
def _report_original(joined: Any, request: Any) -> Iterator[None]:
    """Let errors show the request as its owner made it, since reports of errors show headers."""
    try:
        yield
    except Exception as error:
        for name in ("_request", "request"):
            if vars(error).get(name) is joined:
                setattr(error, name, request)
        raise


def _aiohttp(send: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(send)
    async def send_one(request: Any, *arguments: Any, **named: Any) -> Any:
        # aiohttp makes a request for every hop. Before a hop to https through a proxy it sends
        # CONNECT with the same URL, which the proxy reads.
        if request.method == "CONNECT":
            return await send(request, *arguments, **named)
        url, headers = request.url, request.headers
        key = key_for(url.scheme, url.raw_host, url.port, url.raw_path, headers)
        if key is None:
            return await send(request, *arguments, **named)
        before = headers.copy()
        _set_key(headers, key)
        try:
            return await send(request, *arguments, **named)
        finally:
            # Responses and errors would show the session's key in these headers.
            for name in ("Authorization", *KEY_HEADERS):
                headers.pop(name, None)
                headers.extend((name, value) for value in before.getall(name, ()))

    return send_one


def _aiohttp_made(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def make(request: Any, method: str, url: Any, *arguments: Any, **named: Any) -> None:
        # aiohttp connects to the URL before it sends the request.
        to = followed(str(url), _names_as_sent(named.get("headers")))
        init(request, method, url if to is None else type(url)(to), *arguments, **named)

    return make


def _names_as_sent(headers: Any) -> dict[str, Any]:
    pairs = headers.items() if hasattr(headers, "items") else headers or ()
    return {str(name).lower(): value for name, value in pairs}


def _set_key(headers: Any, key: str) -> None:
    for name in KEY_HEADERS:
        headers.pop(name, None)
    headers["Authorization"] = f"Bearer {key}"


_HTTPX_TARGETS: Sequence[tuple[str, str, Wrap]] = (
    ("Client", "_send_single_request", _httpx_sync),
    ("AsyncClient", "_send_single_request", _httpx_async),
)
_TARGETS: dict[str, Sequence[tuple[str, str, Wrap]]] = {
    "httpx._client": _HTTPX_TARGETS,
    "httpx2._client": _HTTPX_TARGETS,
    "aiohttp.client_reqrep": (
        ("ClientRequest", "send", _aiohttp),
        ("ClientRequest", "__init__", _aiohttp_made),
    ),
    "requests.adapters": (("HTTPAdapter", "send", _requests),),
}
"""The methods that send one request, by their module: class, method, and patch."""


class _Patches:
    """The patches, which are in effect while at least one session needs them."""

    def __init__(self) -> None:
        self._users = 0
        self._lock = threading.RLock()
        self._applied: list[tuple[type, str, Any, Any]] = []
        """Tuples of the class, the method's name, the original, and the patch."""
        self._watch = _ImportWatcher(self._imported)

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                sys.meta_path.insert(0, self._watch)
                for name in _TARGETS:
                    if (module := sys.modules.get(name)) is not None:
                        self._patch(module)

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                with suppress(ValueError):
                    sys.meta_path.remove(self._watch)
                while self._applied:
                    _unpatch(*self._applied.pop())

    def forked(self) -> None:
        """Replace the lock in a forked process, which lacks the thread that may hold it."""
        self._lock = threading.RLock()

    def _imported(self, module: ModuleType) -> None:
        with self._lock:
            if self._users:
                self._patch(module)

    def _patch(self, module: ModuleType) -> None:
        for class_name, method, wrap in _TARGETS[module.__name__]:
            owner = getattr(module, class_name, None)
            original = vars(owner).get(method) if owner is not None else None
            if owner is None or original is None:
                log.warning(
                    "this version of %s cannot be patched: its requests do not join sessions by "
                    "themselves; pass the session's api_key to its clients",
                    module.__name__.split(".")[0],
                )
                continue
            patch = wrap(original)
            setattr(owner, method, patch)
            self._applied.append((owner, method, original, patch))


def _unpatch(owner: type, method: str, original: Any, patch: Any) -> None:
    """Undo a patch, unless another library has patched the method since: below that it stays
    without effect."""
    if vars(owner).get(method) is patch:
        setattr(owner, method, original)


class _ImportWatcher(MetaPathFinder):
    """Reports the clients that are imported while it is on ``sys.meta_path``."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        self._imported = imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _TARGETS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and hasattr(spec.loader, "exec_module"):
                self._report_import(fullname, spec)
                return spec
        return None

    def _report_import(self, name: str, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_report(module: ModuleType) -> None:
            execute(module)
            # Some loaders load many modules, such as that of a zip file.
            if module.__name__ == name:
                self._imported(module)

        loader.exec_module = execute_and_report


patches = _Patches()
os.register_at_fork(after_in_child=patches.forked)
