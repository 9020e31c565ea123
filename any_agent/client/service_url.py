"""Where a service is: a URL, or a file that holds it because the service moves.

A run that its scheduler stops and starts again comes back on other machines, and writes its new
URL into the same file of a shared directory. Whoever is told ``file:///shared/run/url`` follows it.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from any_agent.errors import ConfigError
from any_agent.keys import SESSION_KEY_PREFIX

_SCHEME = "file:"
_FRESH = 0.5
"""Seconds for which what was read is taken as it is: less than clients wait before they try again,
so each attempt after the first goes to where the service is now."""
_LONGEST = 4096
"""Bytes of such a file."""
_EARLIER = 16
"""Places that a service was at before, which are remembered."""


def names_file(url: str) -> bool:
    """Whether it names a file that holds the URL."""
    return url[: len(_SCHEME)].lower() == _SCHEME


def checked_url(url: str, named_by: str) -> str:
    """Without `/v1`. ConfigError for what is no service's URL; it shows no password."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        parsed = httpx.URL("")
    if parsed.userinfo:
        raise ConfigError(
            f"{named_by} holds a user or a password before its host: keys go into "
            "ANY_AGENT_API_KEY, as URLs are written into logs"
        )
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            f"{named_by} is {url[:200]!r}, which is no URL of a service: it begins with http:// "
            "or https://, like http://127.0.0.1:8000, or with file:/// for a file that holds it"
        )
    if SESSION_KEY_PREFIX in parsed.path:
        raise ConfigError(
            f"{named_by} names one session in its path, under which no others are opened: leave "
            "the session's key out"
        )
    if parsed.query or parsed.fragment:
        raise ConfigError(f"{named_by} must end with its path, without ? or #")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class UrlFile:
    """A file with the URL of a service, which may be another one later. Get it by :func:`url_file`.

    While it is not there, empty or unreadable, what was read last stands: a service that moves is
    away for a while, and so may be its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._url: str | None = None
        self._read_at = float("-inf")
        self._earlier: deque[str] = deque(maxlen=_EARLIER)
        self.moved_at = float("-inf")

    def now(self) -> str | None:
        """Where the service is; None while nobody has said it. ConfigError for another content."""
        if time.monotonic() - self._read_at < _FRESH:
            return self._url
        return self.read()

    def read(self) -> str | None:
        """The same, from the file at once."""
        self._read_at = time.monotonic()
        try:
            # Opened each time: what a network file system says of a file may be some time old, but
            # not what it holds.
            with open(self.path, "rb", opener=_at_once) as file:
                self._require_trusted(os.fstat(file.fileno()), os.stat(self.path.parent))
                text = file.read(_LONGEST).decode("utf-8", "replace").strip()
        except OSError:
            return self._url
        if text:
            url = checked_url(text, f"the file {self.path}")
            if url != self._url:
                if self._url is not None:
                    self._earlier.append(self._url)
                    self.moved_at = self._read_at
                self._url = url
        return self._url

    def _require_trusted(self, file: os.stat_result, folder: os.stat_result) -> None:
        """ConfigError where anybody could have keys sent to wherever they like."""
        wrong = ""
        if file.st_mode & stat.S_IWOTH:
            wrong = f"everybody may write the file {self.path}: chmod o-w it"
        elif folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
            wrong = f"everybody may replace the file {self.path}: chmod o-w its folder"
        elif file.st_uid not in (os.geteuid(), 0, folder.st_uid):
            wrong = (
                f"the file {self.path} is neither yours, nor root's, nor that of its folder's "
                "owner: name one in the run's folder"
            )
        if wrong:
            raise ConfigError(f"keys would go to wherever somebody else likes, as {wrong}")

    def is_at(self, url: str) -> bool:
        """Whether a request for this URL goes to where the service is now."""
        now = self._quietly()
        return now is not None and url.startswith(f"{now}/")

    def moved(self, url: str) -> str | None:
        """Where a request goes now that was made for an earlier place of the service, or for the
        file's own URL; None for every other one, and if it is where it was."""
        now = self._quietly()
        if now is None:
            return None
        if names_file(url):
            path = _behind(url[len(_SCHEME) :], str(self.path))
            return f"{now}{path}" if path is not None else None
        for earlier in {*self._earlier} - {now}:
            if url.startswith(f"{earlier}/"):
                return f"{now}{url[len(earlier) :]}"
        return None

    def _quietly(self) -> str | None:
        """A file with another content is told of to those who ask for the service: a request may be
        anybody's."""
        try:
            return self.now()
        except ConfigError:
            return self._url


def _at_once(path: str, flags: int) -> int:
    """A pipe would wait for who writes into it."""
    return os.open(path, flags | os.O_NONBLOCK)


_files: dict[Path, UrlFile] = {}
"""Those that this process was told of."""


def url_file(url: str, named_by: str) -> UrlFile:
    """The process's one for a file's URL. ConfigError, which says what names it, for another."""
    try:
        parsed = urlsplit(url)
        path = Path(unquote(parsed.path))
    except ValueError:
        parsed, path = urlsplit(""), Path()
    if (
        parsed.netloc not in ("", "localhost")
        or not path.is_absolute()
        or "\0" in str(path)
        or parsed.query
        or parsed.fragment
    ):
        raise ConfigError(
            f"{named_by} is {url[:200]!r}: a file that holds a service's URL is named by its whole "
            "path, like file:///shared/run/url"
        )
    return _files.setdefault(path, UrlFile(path))


def _behind(path: str, file: str) -> str | None:
    """The service's path in that of a request to a file's URL; None for another file's."""
    path = f"/{path.lstrip('/')}"
    if not path.startswith(f"{file}/"):
        return None
    # To httpx a URL without a host is a relative one: what joins it to a base joins it again.
    while path.startswith(f"{file}/"):
        path = path[len(file) :]
    # OpenAI's clients put their paths behind what ends with /v1 elsewhere.
    return path if path.startswith("/v1/") else f"/v1{path}"


def moved(url: str) -> str | None:
    """Where a request for this URL goes instead, as its service has moved since; None: nowhere."""
    # Where several were at a place, whoever is there now is meant, else the last one to leave it.
    files = sorted(_files.values(), key=lambda file: -file.moved_at)
    if any(file.is_at(url) for file in files):
        return None
    return next((to for file in files if (to := file.moved(url)) is not None), None)
