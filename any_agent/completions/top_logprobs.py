"""The likeliest tokens at each position, as a record keeps them for an answer that is replayed."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

TopLogprobs: TypeAlias = list[list[tuple[int, float]]]
"""Per token the likeliest ids and their log-probabilities, best first."""


def pack_top_logprobs(rows: TopLogprobs) -> dict[str, Any]:
    """As JSON: how many each token has, and all of them as packed int32 and float32."""
    flat = [entry for row in rows for entry in row]
    ids = np.array([id for id, _ in flat], dtype="<i4")
    logprobs = np.array([logprob for _, logprob in flat], dtype="<f4")
    counts = np.array([len(row) for row in rows], dtype="<i4")
    return {
        name: b64encode(array.tobytes()).decode()
        for name, array in (("counts", counts), ("ids", ids), ("logprobs", logprobs))
    }


def unpack_top_logprobs(packed: Mapping[str, Any]) -> TopLogprobs:
    """The inverse of :func:`pack_top_logprobs`."""
    counts = _array(packed["counts"], "<i4")
    flat = list(zip(_array(packed["ids"], "<i4"), _array(packed["logprobs"], "<f4"), strict=True))
    out, at = [], 0
    for count in counts:
        out.append(flat[at : at + count])
        at += count
    return out


def _array(text: str, kind: str) -> list[Any]:
    return list(np.frombuffer(b64decode(text), dtype=kind).tolist())
