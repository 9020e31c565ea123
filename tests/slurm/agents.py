"""Agents outside of a job: ``python -m tests.slurm.agents``, with `ANY_AGENT_URL=file://<run>/url`.

They echo digits as the demo's do, until training has ended, and print what became of their runs.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from openai import AsyncOpenAI

from any_agent import AgentRunner
from any_agent.demo.driver import GROUP_SIZE
from any_agent.demo.setups import TINY
from any_agent.demo.task import RETRY, Item, is_correct, items, messages, shuffled
from any_agent.sdk.session import AsyncSession


async def echo(item: Item, session: AsyncSession) -> dict[str, float]:
    """Ask once, and once more if the answer is not right; the last turn's outcome is its reward."""
    client: AsyncOpenAI = session.openai()
    talk: list[Any] = list(messages(item))
    for _ in range(2):
        done = await client.chat.completions.create(model="any", messages=talk)
        text = done.choices[0].message.content or ""
        right = is_correct(text, item)
        if right:
            break
        talk += [{"role": "assistant", "content": text}, {"role": "user", "content": RETRY}]
    return {done.id: float(right)}


def main() -> None:
    runner = AgentRunner(
        concurrency=16, group_size=GROUP_SIZE, epochs=1000, ttl=TINY.patience, progress=False
    )
    results = runner.run(echo, shuffled(items(held_out=False), 0))
    failed = [result.error for result in results if result.state == "failed"]
    print(
        json.dumps(
            {
                "states": Counter(result.state for result in results),
                "stopped": str(results.stopped),
                "failed": failed[:5],
            }
        )
    )


if __name__ == "__main__":
    main()
