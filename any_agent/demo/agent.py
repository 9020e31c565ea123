"""The demo's agent. It knows the OpenAI SDK and two environment variables, nothing of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai

# One connection pool for the process, as a long-lived agent would have.
_HTTP = openai.DefaultHttpxClient()


def answer(
    messages: list[dict[str, Any]], correct: Callable[[str], bool], retry: str
) -> list[tuple[str, str]]:
    """Ask once, and once more if the answer is not correct.

    Returns (completion id, text) of each turn. `OPENAI_BASE_URL` and `OPENAI_API_KEY` are read by
    the SDK itself.
    """
    client = openai.OpenAI(http_client=_HTTP)
    talk = list(messages)
    turns: list[tuple[str, str]] = []
    for _ in range(2):
        completion = client.chat.completions.create(model="gpt-4o-mini", messages=talk)  # type: ignore[arg-type]
        text = completion.choices[0].message.content or ""
        turns.append((completion.id, text))
        if correct(text):
            break
        talk += [{"role": "assistant", "content": text}, {"role": "user", "content": retry}]
    return turns
