"""The likeliest tokens at each position, as a record keeps them for an answer that is replayed."""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from any_agent.types import Interaction

TopLogprobs: TypeAlias = list[list[tuple[int, float]]]
"""Per token the likeliest ids and their log-probabilities, best first."""


class PackedTopLogprobs:
    """Such rows as they come, in 8 bytes an entry instead of a hundred."""

    __slots__ = ("_counts", "_ids", "_logprobs")

    def __init__(self) -> None:
        self._counts = array("i")
        self._ids = array("i")
        self._logprobs = array("f")

    def __len__(self) -> int:
        return len(self._counts)

    def extend(self, rows: TopLogprobs) -> None:
        for row in rows:
            self._counts.append(len(row))
            for id, logprob in row:
                self._ids.append(id)
                self._logprobs.append(logprob)

    def rows(self) -> TopLogprobs:
        return _rows(self._counts.tolist(), self._ids.tolist(), self._logprobs.tolist())

    def to_json(self) -> dict[str, str]:
        """How many each token has, and all of them as packed int32 and float32."""
        packed = (
            ("counts", np.array(self._counts, dtype="<i4")),
            ("ids", np.array(self._ids, dtype="<i4")),
            ("logprobs", np.array(self._logprobs, dtype="<f4")),
        )
        return {name: b64encode(values.tobytes()).decode() for name, values in packed}


def unpack_top_logprobs(packed: Mapping[str, Any]) -> TopLogprobs:
    """The rows of :meth:`PackedTopLogprobs.to_json`."""
    return _rows(
        *[_array(packed[n], k) for n, k in (("counts", "<i4"), ("ids", "<i4"), ("logprobs", "<f4"))]
    )


def top_logprobs_of(interaction: Interaction) -> TopLogprobs | None:
    """Of a recorded answer; None if they were not asked for."""
    packed = interaction.request.get("top_logprobs")
    return unpack_top_logprobs(packed) if packed is not None else None


def _rows(counts: list[int], ids: list[int], logprobs: list[float]) -> TopLogprobs:
    flat = list(zip(ids, logprobs, strict=True))
    out, at = [], 0
    for count in counts:
        out.append(flat[at : at + count])
        at += count
    return out


def _array(text: str, kind: str) -> list[Any]:
    return list(np.frombuffer(b64decode(text), dtype=kind).tolist())
