"""A cache of earlier requests of a session, which are recognised by their raw bytes.

An agent sends its whole conversation with every call. Nearly all of it repeats, byte for byte, an
earlier request of its session, so only the messages that follow are normalised, hashed and checked.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import orjson

_MOST = 8  # number of cached requests: several agents of one session may take turns
_SLICE = 64  # number of messages that are serialized at once
_PLAIN = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
ENTRY_BYTES = 500  # the approximate size of one cached request


@dataclass(frozen=True, slots=True)
class RequestPrefix:
    """The known facts about a request."""

    messages: int
    """Number of messages."""
    key: bytes
    """The request's chain key."""
    characters: int
    """Number of characters in its texts."""
    json_size: int
    """Size of its messages in bytes, as JSON."""
    parent: tuple[bytes, int] | None
    """The key of the longest recorded prefix, and the number of messages that it covers."""
    unlike: frozenset[str]
    """Interactions that it does not continue, because their reasoning differs."""


class RequestPrefixCache:
    """The latest requests of one session; thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, RequestPrefix] = OrderedDict()
        self._forgotten = 0
        """Number of times that the cache was cleared. It is part of each digest, so that a request
        that is noted late is never found again."""
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, messages: Sequence[Any], head: Any) -> tuple[RequestPrefix | None, bytes | None]:
        """Return the longest cached prefix, and the digest under which to :meth:`note` the request.

        ``head``: the tools and the template of the messages. The digest is None if JSON cannot
        represent them.
        """
        with self._lock:
            counts = {b.messages for b in self._known.values() if b.messages <= len(messages)}
        found: RequestPrefix | None = None
        try:
            digest = hashlib.sha256(orjson.dumps([self._forgotten, head], option=_PLAIN))
            at = 0
            for count in sorted(counts | {len(messages)}):
                while at < count:
                    end = min(count, at + _SLICE)
                    data = orjson.dumps(messages[at:end], option=_PLAIN)
                    # Without brackets the digest does not depend on the slices.
                    digest.update(memoryview(data)[1:-1])
                    digest.update(b",")
                    at = end
                found = self._known.get(digest.digest(), found)
        except TypeError:
            return None, None
        return found, digest.digest()

    def note(self, digest: bytes, request: RequestPrefix) -> None:
        """Cache a valid request."""
        with self._lock:
            self._known[digest] = request
            self._known.move_to_end(digest)
            if len(self._known) > _MOST:
                self._known.popitem(last=False)

    def forget(self) -> None:
        """Clear the cache: a new interaction may be the better one to continue."""
        with self._lock:
            self._forgotten += 1
            self._known.clear()
