"""Ids of tool calls, known when a call opens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from any_agent.types import IdArray


class ToolCallIds:
    """``call_<hex>``, the same for the same seed, the same prompt and the same output so far.

    Each text is hashed once, however many calls an output has; without a call nothing is.
    """

    def __init__(self, prompt_ids: Sequence[int] | IdArray, seed: bytes = b"") -> None:
        """``seed``: what is another answer's, to the same prompt too, has other ids."""
        self._prompt_ids = prompt_ids
        self._seed = seed
        self._hash: hashlib.blake2b | None = None

    def make(self, since: Iterable[str], index: int, name: str) -> str:
        """``since``: the output's texts after the last call's opening."""
        if self._hash is None:
            packed = np.asarray(self._prompt_ids, dtype="<i4").tobytes()
            seed = hashlib.blake2b(self._seed).digest()
            self._hash = hashlib.blake2b(packed, digest_size=12, key=seed)
        text = f"{''.join(since)}\0{index}\0{name}\0"
        self._hash.update(text.encode(errors="surrogatepass"))
        return "call_" + self._hash.hexdigest()
