"""The server-sent events of a Responses stream. What they have in common is written once."""

from __future__ import annotations

import orjson


class EventFactory:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._number = 0

    def event(self, kind: bytes, fields: bytes) -> bytes:
        """``fields``: JSON of what comes between type and number, without braces."""
        number = self._number
        self._number = number + 1
        return b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%d}\n\n' % (
            kind,
            kind,
            fields,
            number,
        )

    def delta(self, before: bytes, text: str) -> bytes:
        """The next step of a text; ``before`` is :func:`opening`'s."""
        number = self._number
        self._number = number + 1
        return b'%b%b,"sequence_number":%d}\n\n' % (before, orjson.dumps(text), number)


def opening(kind: bytes, where: bytes, more: bytes = b"") -> bytes:
    """A delta event up to its text."""
    return b'event: %b\ndata: {"type":"%b",%b%b,"delta":' % (kind, kind, where, more)
