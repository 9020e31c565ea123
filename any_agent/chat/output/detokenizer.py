"""Incremental decoding of token ids, at a cost per token that does not grow with the output."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

from any_agent.types import IdArray, plain_ids

_INCOMPLETE = "�"
_PROBE_IDS = 512


def decode_ids(tokenizer: Any, ids: Sequence[int] | IdArray) -> str:
    """Return the text of token ids, special tokens spelled out."""
    plain = plain_ids(ids)
    return str(
        tokenizer.decode(plain, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


class _ByteDetokenizer:
    """A detokenizer for byte-level BPE: each token is some bytes of a UTF-8 stream."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens complete; an unfinished character waits."""
        table, size = self._table, len(self._table)
        return self._decoder.decode(b"".join([table[i] for i in ids if 0 <= i < size]))

    def flush(self) -> str:
        """Return the remaining text; an unfinished character becomes U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class WindowDetokenizer:
    """A detokenizer for any other tokenizer: decodes a few tokens with earlier ones as context."""

    _max_character_tokens = 8
    """The most tokens that one character can take (byte fallback: four); more are broken bytes."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        out = []
        # One by one, so that the text does not depend on how the engine cut its chunks.
        for i in ids:
            self._pending.append(i)
            text, certain = self._text(self._pending), len(self._pending)
            if text.endswith(_INCOMPLETE):
                if len(self._pending) < self._max_character_tokens:
                    continue
                text, certain = self._before_last_character(text)
            out.append(text)
            self._context, self._pending = self._pending[:certain], self._pending[certain:]
        return "".join(out)

    def flush(self) -> str:
        text = self._text(self._pending) if self._pending else ""
        self._context, self._pending = [], []
        return text

    def _before_last_character(self, text: str) -> tuple[str, int]:
        """Return the part of the pending ``text`` that no later token changes, and its tokens.

        The last broken bytes may begin a character; they are at most three tokens.
        """
        for certain in range(len(self._pending) - 1, len(self._pending) - 4, -1):
            part = self._text(self._pending[:certain])
            if part != text and text.startswith(part):
                return part, certain
        return text, len(self._pending)

    def _text(self, ids: list[int]) -> str:
        """Return the text of these tokens after the context."""
        if not self._context:
            return self._decode(ids)
        before = self._decode(self._context)
        both = self._decode(self._context + ids)
        # A decoder that rewrites earlier text (white space clean-up) has no certain prefix.
        return both[len(before) :] if both.startswith(before) else self._decode(ids)


Detokenizer: TypeAlias = _ByteDetokenizer | WindowDetokenizer
"""The decoder of one output; the parts it returns concatenate to the output's text."""


def detokenizer_factory(
    tokenizer: Any, decode: Callable[[list[int]], str]
) -> Callable[[], Detokenizer]:
    """Return a maker of detokenizers: by the byte table if it decodes probes exactly."""
    table = _byte_table(tokenizer)
    if table is not None and _agrees(table, decode):
        return lambda: _ByteDetokenizer(table)
    return lambda: WindowDetokenizer(decode)


def token_bytes_of(tokenizer: Any, decode: Callable[[list[int]], str]) -> Callable[[int], bytes]:
    """Return a function from a token to its bytes: by the byte table, else by its text."""
    table = _byte_table(tokenizer)
    if table is None:
        return lambda i: decode([i]).encode(errors="replace")
    return lambda i: table[i] if 0 <= i < len(table) else b""


def _byte_table(tokenizer: Any) -> list[bytes] | None:
    """Return the bytes of each id for a byte-level decoder, else None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return None
    try:
        if json.loads(decoder.__getstate__()).get("type") != "ByteLevel":
            return None
    except (ValueError, TypeError, AttributeError):
        return None
    alphabet = _byte_alphabet()
    vocab: dict[str, int] = tokenizer.get_vocab()
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        # An added token is spelled in plain characters where the alphabet lacks one of them.
        plain = any(c not in alphabet for c in token)
        table[i] = token.encode() if plain else bytes(alphabet[c] for c in token)
    return table


@cache
def _byte_alphabet() -> dict[str, int]:
    """Map the printable characters of GPT-2's byte-level BPE to the bytes that they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    shifted = {chr(256 + n): b for n, b in enumerate(others)}
    return {chr(b): b for b in printable} | shifted


def _agrees(table: list[bytes], decode: Callable[[list[int]], str]) -> bool:
    rng = random.Random(0)
    for _ in range(4):
        ids = [rng.randrange(len(table)) for _ in range(_PROBE_IDS)]
        if b"".join(table[i] for i in ids).decode(errors="replace") != decode(ids):
            return False
    return True
