"""Encoded bodies: decoded in pieces of a bounded size, and refused by what is wrong with them."""

from __future__ import annotations

import gzip
import os
import zlib

import pytest

from any_agent.errors import InvalidRequest, UnsupportedEncoding
from any_agent.runtime.content_coding import PIECE_BYTES, BodyDecoder, coding_of
from tests.support.errors import fails_with

TEXT = b'{"a": "' + b"x" * PIECE_BYTES + b'"}' + os.urandom(100)


def _raw(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def _decoded(coding: str, body: bytes, at_once: int = 1 << 20) -> bytes:
    decoder = BodyDecoder([coding])
    out: list[bytes] = []
    for at in range(0, len(body), at_once):
        out += decoder.pieces(body[at : at + at_once])
    decoder.finish()
    assert all(len(piece) <= PIECE_BYTES for piece in out) or coding == "identity"
    return b"".join(out)


@pytest.mark.parametrize("at_once", [7, 1 << 20])
@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(TEXT)),
        ("X-GZip", gzip.compress(TEXT)),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", _raw(TEXT)),
        ("identity", TEXT[:1000]),
        ("", TEXT[:1000]),
    ],
)
def test_each_part_is_decoded_wherever_it_is_cut(coding: str, body: bytes, at_once: int) -> None:
    assert _decoded(coding, body, at_once) in (TEXT, TEXT[:1000])


@pytest.mark.parametrize(
    "size", [0, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES]
)
def test_decoding_leaves_no_bytes_behind_a_full_piece(size: int) -> None:
    assert _decoded("gzip", gzip.compress(b"x" * size)) == b"x" * size


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_damaged_body_is_the_clients_error(coding: str) -> None:
    whole = (gzip.compress if coding == "gzip" else zlib.compress)(TEXT)
    for body in (b"{}", whole[:-1], whole + b"{}", whole[:-4] + b"\0\0\0\0"):
        with fails_with(InvalidRequest, code="invalid_encoding"):
            _decoded(coding, body)


def test_other_codings_are_refused_with_those_that_are_taken() -> None:
    assert coding_of(["identity", " gzip ,identity"]) == "gzip"
    assert coding_of([" identity", ""]) is None
    for values in (["zstd"], ["br"], ["gzip, gzip"], ["gzip", "deflate"]):
        with fails_with(UnsupportedEncoding, status=415) as error:
            coding_of(values)
        assert error.value.headers()["Accept-Encoding"] == "gzip, deflate"
