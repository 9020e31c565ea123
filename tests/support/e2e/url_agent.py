"""An agent as somebody has it already: it reads a URL and a key from its environment, and knows of
no session, no reward and no training.

It asks one question after the other, and each of them again. Eight of its workers ask the same.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

import openai

_AT_ONCE = 4
_ALIKE = 8


async def _talk(client: openai.AsyncOpenAI, question: str) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for again in ("And another one.", "Thanks."):
        done = await client.chat.completions.create(model="gpt-4o", messages=messages)
        messages += [done.choices[0].message.to_dict(), {"role": "user", "content": again}]


async def _work(client: openai.AsyncOpenAI, number: int) -> None:
    for turn in itertools.count():
        try:
            await _talk(client, f"Say something, please. ({number} {turn})")
        except openai.OpenAIError as error:
            # Whatever it is, an agent like this one goes on.
            print(error, file=sys.stderr, flush=True)
            await asyncio.sleep(0.2)


async def main() -> None:
    async with openai.AsyncOpenAI() as client:
        workers = (_work(client, k // _ALIKE) for k in range(_AT_ONCE * _ALIKE))
        await asyncio.gather(*workers)


if __name__ == "__main__":
    asyncio.run(main())
