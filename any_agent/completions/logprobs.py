"""Log-probabilities: packed for the record and for replays, and encoded in OpenAI's form."""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import orjson

from any_agent.chat import ChatFormat
from any_agent.types import Interaction

TopLogprobs: TypeAlias = list[list[tuple[int, float]]]
"""The likeliest ids and their log-probabilities for each token, best first."""


class PackedTopLogprobs:
    """Rows that are added one by one, in 8 bytes an entry instead of a hundred."""

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
        """Return the number of entries of each token, and all entries as int32 and float32."""
        packed = (
            ("counts", np.array(self._counts, dtype="<i4")),
            ("ids", np.array(self._ids, dtype="<i4")),
            ("logprobs", np.array(self._logprobs, dtype="<f4")),
        )
        return {name: b64encode(values.tobytes()).decode() for name, values in packed}


def unpack_top_logprobs(packed: Mapping[str, Any]) -> TopLogprobs:
    """Undo :meth:`PackedTopLogprobs.to_json`."""
    return _rows(
        *[_array(packed[n], k) for n, k in (("counts", "<i4"), ("ids", "<i4"), ("logprobs", "<f4"))]
    )


def top_logprobs_of(interaction: Interaction) -> TopLogprobs | None:
    """Return a recorded answer's rows; None if the request asked for none."""
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


_MIN_LOGPROB = -9999.0
"""OpenAI's log-probability of a token that is never sampled: JSON has no infinity."""


class LogprobsEncoder:
    """Encodes log-probabilities of one chat format's tokens; each token's text is encoded once."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._heads: dict[int, bytes] = {}

    def chat(self, ids: list[int], logprobs: list[float], top: TopLogprobs | None) -> bytes:
        """Return the JSON of a chat choice's `logprobs`."""
        return b'{"content":%b,"refusal":null}' % self.entries(ids, logprobs, top)

    def entries(self, ids: list[int], logprobs: list[float], top: TopLogprobs | None) -> bytes:
        """Return the JSON list with an entry for each token."""
        entries = b",".join(
            b'%b,"top_logprobs":[%b]}'
            % (
                self._entry(token, logprob),
                b",".join([self._entry(i, p) + b"}" for i, p in likeliest]),
            )
            for token, logprob, likeliest in zip(ids, logprobs, top or repeat(()), strict=False)
        )
        return b"[%b]" % entries

    def legacy(
        self, ids: list[int], logprobs: list[float], top: TopLogprobs | None, start: int
    ) -> dict[str, Any]:
        """Return a text completion's `logprobs`; ``start``: characters before its first token."""
        tokens = [self._chat.token_text(i) for i in ids]
        offsets, at = [], start
        for token in tokens:
            offsets.append(at)
            at += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(p, _MIN_LOGPROB) for p in logprobs],
            "top_logprobs": None if top is None else [self._by_text(row) for row in top],
            "text_offset": offsets,
        }

    def _by_text(self, row: list[tuple[int, float]]) -> dict[str, float]:
        out: dict[str, float] = {}
        for i, logprob in row:
            # Several tokens may have the same text; the likeliest comes first.
            out.setdefault(self._chat.token_text(i), max(logprob, _MIN_LOGPROB))
        return out

    def _entry(self, token: int, logprob: float) -> bytes:
        head = self._heads.get(token)
        if head is None:
            fields = {
                "token": self._chat.token_text(token),
                "bytes": list(self._chat.token_bytes(token)),
            }
            head = self._heads[token] = orjson.dumps(fields)[:-1] + b',"logprob":'
        return head + orjson.dumps(max(logprob, _MIN_LOGPROB))
