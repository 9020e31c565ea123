"""The demo's agent, which uses the OpenAI SDK and knows nothing of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai

from any_agent.demo.task import TaskTurn

# One connection pool for the process, as a long-lived agent would have; the service is on this
# machine, so no HTTP proxy of the environment is used.
_HTTP = openai.DefaultHttpxClient(trust_env=False)


def answer(
    messages: list[dict[str, Any]],
    correct: Callable[[str], bool],
    retry: str,
    *,
    greedy: bool = False,
) -> list[TaskTurn]:
    """Ask the model once, and once more, by ``retry`` if there is one, after a wrong answer.

    ``greedy`` asks for the likeliest tokens, which the service honours in eval sessions.

    The OpenAI SDK itself reads `OPENAI_BASE_URL` and `OPENAI_API_KEY`.
    """
    client = openai.OpenAI(http_client=_HTTP)
    talk = list(messages)
    turns: list[TaskTurn] = []
    sampling: dict[str, Any] = {"temperature": 0.0} if greedy else {}
    for _ in range(2 if retry else 1):
        completion = client.chat.completions.create(
            model="gpt-4o-mini",
            messages=talk,  # type: ignore[arg-type]
            **sampling,
        )
        text = completion.choices[0].message.content or ""
        tokens = completion.usage.completion_tokens if completion.usage else 0
        turns.append(TaskTurn(completion.id, text, tokens))
        if correct(text):
            break
        talk += [{"role": "assistant", "content": text}, {"role": "user", "content": retry}]
    return turns
