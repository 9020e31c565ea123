"""An agent whose answers another model judges.

The judge is a frozen model: it is called at the same URL under the same key, by its name, and is
never trained on.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

QUESTION = (
    "Question: {question}\nRight answer: {answer}\nGiven answer: {given}\n"
    "Is the given answer right? Say yes or no."
)


class JudgedAgent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """Solve one task, ``{"question": ..., "answer": ...}``; return the judge's reward."""
        client = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"),
            api_key=extra_kwargs.get("api_key"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        given = await said(client, "policy", data["question"])
        verdict = await said(
            client,
            "judge",
            QUESTION.format(question=data["question"], answer=data["answer"], given=given),
            temperature=0,
            max_tokens=8,
        )
        # The reward of the policy's last answer; the judge's own answer is not trained on.
        return float(verdict.strip().lower().startswith("yes"))


async def said(client: AsyncOpenAI, model: str, question: str, **options: Any) -> str:
    done = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], **options
    )
    return done.choices[0].message.content or ""
