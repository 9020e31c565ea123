"""Instructor, which forces the call whose arguments are the model that it returns."""

from __future__ import annotations

from typing import Any

import instructor
from instructor.core import InstructorRetryException
from openai import AsyncOpenAI
from pydantic import BaseModel


class add(BaseModel):
    """Adds two numbers."""

    a: int
    b: int


class Agent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        plain = AsyncOpenAI(
            base_url=extra_kwargs.get("base_url"), api_key=extra_kwargs.get("api_key")
        )
        client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
        question = {"role": "user", "content": data["question"]}
        try:
            found = await client.chat.completions.create(
                model="any", response_model=add, max_retries=0, messages=[question]
            )
        except InstructorRetryException:
            # The arguments were none.
            return 0.0
        return float(found.a + found.b == data["answer"])
