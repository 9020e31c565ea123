"""Prices that nobody can know, and a tool that says them: the agent must learn to ask it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import openai

THINGS = ("pear", "plum", "fig", "nut", "egg", "fish", "rice", "salt")
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
        },
    }
]
_MAX_TURNS = 3
_WORDINGS = ("What does the {t} cost?", "Price of the {t}, please.")
_HELD_OUT_EVERY = 5


def items(split: str) -> list[dict[str, Any]]:
    """The dataset: the price is drawn for each item, and its question does not tell it."""
    return [
        {
            "task_id": f"{thing}-{price}-w{w}",
            "messages": [{"role": "user", "content": wording.format(t=thing)}],
            "thing": thing,
            "answer": str(price),
        }
        for t, thing in enumerate(THINGS)
        for price in range(10)
        for w, wording in enumerate(_WORDINGS)
        if ((t + price) % _HELD_OUT_EVERY == 0) is (split == "valid")
    ]


class PriceAgent:
    """Knows OpenAI's SDK and its tool, nothing of training."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        """1 if the answer is the price."""
        client = openai.AsyncOpenAI(
            base_url=extra_kwargs.get("base_url") or os.getenv("OPENAI_BASE_URL"),
            api_key=extra_kwargs.get("api_key") or os.getenv("OPENAI_API_KEY"),
            http_client=extra_kwargs.get("http_client"),
            max_retries=0,
        )
        talk = list(data["messages"])
        for _ in range(_MAX_TURNS):
            done = await client.chat.completions.create(model="default", messages=talk, tools=TOOLS)
            message = done.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip() == data["answer"])
            talk.append(message.model_dump(exclude_none=True))
            for made in message.tool_calls:
                assert made.type == "function"
                said = price(made.function.arguments, data)
                talk.append({"role": "tool", "tool_call_id": made.id, "content": said})
        return 0.0


def price(arguments: str, data: dict[str, Any]) -> str:
    """The tool. Anything else costs something else."""
    try:
        asked = json.loads(arguments)["item"]
    except (ValueError, KeyError, TypeError):
        return "error"
    cost = int(data["answer"])
    return str(cost if asked == data["thing"] else (cost + 1) % 10)


def call(thing: str) -> str:
    """A call as the model spells it."""
    return f'<tool_call>{{"name": "price", "arguments": {{"item": "{thing}"}}}}</tool_call>'


def texts() -> Iterator[str]:
    """Yield the texts that the tokenizer is made of."""
    for split in ("train", "valid"):
        for item in items(split):
            yield f"tools\n{json.dumps(TOOLS[0]['function'])}"
            yield f"user\n{item['messages'][0]['content']}"
            yield f"assistant\n{call(item['thing'])}"
            yield f"tool\n{item['answer']}"
            yield f"assistant\n{item['answer']}"
