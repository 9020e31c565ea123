"""Content codings of request bodies: gzip and deflate are decoded in pieces, so that a reader can
stop at its limit before a small body becomes a huge one."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from any_agent.errors import InvalidRequest, UnsupportedEncoding

PIECE_BYTES = 1 << 18
"""The most bytes that are decoded at once: a millisecond's work."""
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's `wbits` for each format
_NAMES = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}


class BodyDecoder:
    """Decodes one body, whose parts are given in turn."""

    def __init__(self, values: Iterable[str]) -> None:
        """``values``: those of `Content-Encoding`. UnsupportedEncoding for other codings."""
        self._coding = coding_of(values)
        self._stream: zlib._Decompress | None = None

    @property
    def plain(self) -> bool:
        """The body is in no coding."""
        return self._coding is None

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """Yield what a part of the body stands for; InvalidRequest if it is not in the coding."""
        if self._coding is None:
            yield part
            return
        if self._stream is None and part:
            self._stream = zlib.decompressobj(self._format(part))
        full = False
        # A full piece may leave decoded bytes behind, without any input that is left.
        while part or full:
            assert self._stream is not None
            if self._stream.eof:
                raise self._invalid("has bytes behind its end")
            try:
                piece = self._stream.decompress(part, PIECE_BYTES)
            except zlib.error as error:
                raise self._invalid(f"cannot be decoded ({error})") from None
            part = self._stream.unconsumed_tail or self._stream.unused_data
            full = len(piece) == PIECE_BYTES and not self._stream.eof
            if piece:
                yield piece

    def finish(self) -> None:
        """Raise InvalidRequest if the body ended before what it stands for."""
        if self._stream is not None and not self._stream.eof:
            raise self._invalid("is cut off")

    def _format(self, part: bytes) -> int:
        if self._coding == "gzip":
            return _GZIP
        # Some clients send deflate without its frame, whose first byte names the method 8.
        return _ZLIB if part[0] & 0x0F == 8 else _RAW

    def _invalid(self, what: str) -> InvalidRequest:
        return InvalidRequest(
            f"the body's Content-Encoding is {self._coding}, and the body {what}: send it whole "
            "in that coding, or leave out the header",
            code="invalid_encoding",
        )


def coding_of(values: Iterable[str]) -> str | None:
    """Return the coding that values of `Content-Encoding` name, None for plain bodies.

    UnsupportedEncoding for one that is not taken, and for several.
    """
    names = [name.strip().lower() for value in values for name in value.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if not names:
        return None
    coding = _NAMES.get(names[0]) if len(names) == 1 else None
    if coding is None:
        raise UnsupportedEncoding(
            f"a body in the coding {', '.join(names)[:80]!a} is not taken: send it as "
            f"{UnsupportedEncoding.accepted}, or without Content-Encoding"
        )
    return coding
