"""Compare what the service recorded of an agent's session with what its engine sampled."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np

from tests.clients.live import Live
from tests.support.scripted_run import formula_logprob

_LIMIT = 60.0
"""Seconds."""
_PAGE = 8192


def compare_with_what_was_sampled(
    live: Live, session: str, calls: list[dict[str, Any]], said: list[list[int]]
) -> int:
    """Return the number of calls; AssertionError unless each continues the one before it exactly.

    Its tokens are those that the engine read and wrote, with their log-probabilities and versions.
    """
    assert [call["continuation"] for call in calls] == ["root", *["exact"] * (len(calls) - 1)]
    context: list[int] = []
    for call, asked, answer in zip(calls, live.engine.requests, said, strict=True):
        ids, prompt, logprobs, versions = _tokens(live, f"{session}/interactions/{call['id']}")
        context += ids
        assert context == [*asked["input_ids"], *answer]
        assert ids[prompt:] == answer
        wanted = np.array([formula_logprob(token) for token in answer], np.float32)
        assert np.array_equal(np.array(logprobs[prompt:], np.float32), wanted)
        assert versions[prompt:] == [0] * len(answer)
        assert not [value for value in logprobs[:prompt] if value is not None]
    return len(calls)


def _tokens(live: Live, call: str) -> tuple[list[int], int, list[Any], list[Any]]:
    """A call's tokens, how many of them are of the prompt, their log-probabilities, versions."""
    ids: list[int] = []
    logprobs: list[Any] = []
    versions: list[Any] = []
    while True:
        page = session_part(live, f"{call}/tokens", start=len(ids), limit=_PAGE)
        assert page["trained"] and page["ids"]
        ids += page["ids"]
        logprobs += page["logprobs"]
        versions += page["versions"]
        if len(ids) == page["total"]:
            return ids, page["prompt"], logprobs, versions


def session_part(live: Live, what: str, **query: int) -> dict[str, Any]:
    answer = httpx.get(f"{live.url}/rl/v1/sessions/{what}", params=query, timeout=_LIMIT)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
