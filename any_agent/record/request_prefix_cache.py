"""The beginnings of earlier requests, known again by their raw bytes.

An agent sends its whole conversation with every call. Nearly all of it is, byte for byte, an
earlier request of its session, and what was found out about that need not be found out again: only
the messages that follow are normalised, hashed and checked.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import orjson

_MOST = 8
"""Requests that are remembered: agents of one session may take turns."""
_SLICE = 64
"""Messages that are written at once."""
_PLAIN = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
ENTRY_BYTES = 500
"""Of one that is remembered, about."""


@dataclass(frozen=True, slots=True)
class RequestPrefix:
    """What was found out about a request."""

    messages: int
    """How many it has."""
    key: bytes
    """Its chain key."""
    characters: int
    """Of its texts."""
    json_size: int
    """Bytes of its messages, all that is in them."""
    parent: tuple[bytes, int] | None
    """The key of the longest recorded prefix, and how many messages that covers."""
    unlike: frozenset[str]
    """Interactions that it does not continue, because they reasoned otherwise."""


class RequestPrefixCache:
    """A few beginnings of one session's requests; may be used from any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, RequestPrefix] = OrderedDict()
        self._forgotten = 0
        """How often; in the digests, so that what is noted late is never found again."""
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._known)

    def look(self, messages: Sequence[Any], head: Any) -> tuple[RequestPrefix | None, bytes | None]:
        """The longest known beginning, and the digest to :meth:`note` this request under.

        ``head``: what the messages belong to (tools, template). None for what JSON cannot write.
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
                    # Without brackets: however it is cut, the digest is the same.
                    digest.update(memoryview(data)[1:-1])
                    digest.update(b",")
                    at = end
                found = self._known.get(digest.digest(), found)
        except TypeError:
            return None, None
        return found, digest.digest()

    def note(self, digest: bytes, beginning: RequestPrefix) -> None:
        """Remember a request that was found to be valid."""
        with self._lock:
            self._known[digest] = beginning
            self._known.move_to_end(digest)
            if len(self._known) > _MOST:
                self._known.popitem(last=False)

    def forget(self) -> None:
        """Something was recorded that may be the better one to continue."""
        with self._lock:
            self._forgotten += 1
            self._known.clear()
