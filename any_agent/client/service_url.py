"""The address of a service: a URL, or a file that holds the URL of a service that moves.

A run that its scheduler stops and restarts may return on other machines, and writes its new URL
into the same file of a shared directory. A client of ``file:///shared/run/url`` follows it.
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
from any_agent.runtime.file_owner import no_access

_SCHEME = "file:"
_MAX_AGE = 0.5
"""Seconds for which a read is reused. Clients wait longer between attempts, so that each attempt
after the first goes to the current address."""
_MAX_BYTES = 4096  # the largest size of such a file
_MAX_EARLIER = 16  # the number of earlier addresses of a service that are remembered


def names_file(url: str) -> bool:
    """Return True if ``url`` names a file that holds the URL."""
    return url[: len(_SCHEME)].lower() == _SCHEME


def checked_url(url: str, named_by: str) -> str:
    """Return a service's URL without `/v1`; ConfigError, without any password, for another text."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        parsed = httpx.URL("")
    if parsed.userinfo:
        raise ConfigError(
            f"{named_by} holds a user or a password before its host: put the key into "
            "ANY_AGENT_API_KEY, as URLs are written into logs"
        )
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            f"{named_by} is {url[:200]!r}, which is no URL of a service: a URL begins with http:// "
            "or https://, like http://127.0.0.1:8000, or with file:/// for a file that holds it"
        )
    if SESSION_KEY_PREFIX in parsed.path:
        raise ConfigError(
            f"{named_by} names one session in its path, under which no other can be opened: "
            "remove the session's key"
        )
    if parsed.query or parsed.fragment:
        raise ConfigError(f"{named_by} must end with its path, without ? or #")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


class UrlFile:
    """A file with the current URL of a service. Get it by :func:`url_file`.

    While the file is missing, empty or unreadable, the last URL stays valid: a service that moves
    is away for a while, and so may be its file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._url: str | None = None
        self._read_at = float("-inf")
        self._earlier: deque[str] = deque(maxlen=_MAX_EARLIER)
        self.moved_at = float("-inf")

    def now(self) -> str | None:
        """Return the service's URL, None while it is unknown.

        Raises ConfigError for a bad file, and for one of another user that was never read.
        """
        if time.monotonic() - self._read_at < _MAX_AGE:
            return self._url
        return self.read()

    def read(self) -> str | None:
        """Read the file at once and return the URL, as :meth:`now` does."""
        self._read_at = time.monotonic()
        try:
            # Opened each time: a network file system may report old metadata of a file, but not old
            # content.
            with open(self.path, "rb", opener=_at_once) as file:
                self._require_trusted(os.fstat(file.fileno()), os.stat(self.path.parent))
                text = file.read(_MAX_BYTES).decode("utf-8", "replace").strip()
        except OSError as error:
            if isinstance(error, PermissionError) and self._url is None:
                raise no_access(error) from None
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
        """Raise ConfigError where another user could redirect keys to another address."""
        wrong = ""
        if file.st_mode & stat.S_IWOTH:
            wrong = f"every user may write the file {self.path}: chmod o-w it"
        elif folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
            wrong = f"every user may replace the file {self.path}: chmod o-w its folder"
        elif file.st_uid not in (os.geteuid(), 0, folder.st_uid):
            wrong = (
                f"the file {self.path} is neither yours, nor root's, nor that of its folder's "
                "owner: name one in the run's folder"
            )
        if wrong:
            raise ConfigError(f"another user could redirect the keys, as {wrong}")

    def is_at(self, url: str) -> bool:
        """Return True if this URL is at the service's current address."""
        now = self._quietly()
        return now is not None and url.startswith(f"{now}/")

    def moved(self, url: str) -> str | None:
        """Return the current URL for one at an earlier address or at the file's own URL.

        None for every other URL, and for one at the current address.
        """
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
        """Return the URL, the last valid one for a bad file, whose error is for callers that need
        the service: this request may be for another one."""
        try:
            return self.now()
        except ConfigError:
            return self._url


def _at_once(path: str, flags: int) -> int:
    """Open without blocking: opening a pipe would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


known_files: dict[Path, UrlFile] = {}
"""The files that this process follows."""


def url_file(url: str, named_by: str) -> UrlFile:
    """Return the process's UrlFile for a `file:` URL; ConfigError names ``named_by`` otherwise."""
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
            f"{named_by} is {url[:200]!r}: name the file with a service's URL by its full path, "
            "like file:///shared/run/url"
        )
    return known_files.setdefault(path, UrlFile(path))


def _behind(path: str, file: str) -> str | None:
    """Return the part of a path that follows the file's path; None for another file."""
    path = f"/{path.lstrip('/')}"
    if not path.startswith(f"{file}/"):
        return None
    # httpx takes a URL without a host as relative, and appends it to the base again.
    while path.startswith(f"{file}/"):
        path = path[len(file) :]
    # OpenAI's clients add their paths to a base URL, which usually ends with /v1.
    return path if path.startswith("/v1/") else f"/v1{path}"


def moved(url: str) -> str | None:
    """Return the URL to use instead because its service has moved; None if it has not."""
    # Of several services at one address the present one counts, else the last one that left it.
    files = sorted(known_files.values(), key=lambda file: -file.moved_at)
    if any(file.is_at(url) for file in files):
        return None
    return next((to for file in files if (to := file.moved(url)) is not None), None)
