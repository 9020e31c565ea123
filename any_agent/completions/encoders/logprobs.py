"""Log-probabilities in OpenAI's form: `logprobs` of a chat choice, and of a legacy completion."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import orjson

from any_agent.chat import ChatFormat
from any_agent.completions.top_logprobs import TopLogprobs

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
