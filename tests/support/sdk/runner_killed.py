"""A script to be killed: ``python -m tests.support.sdk.runner_killed FILE ITEMS``."""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

from any_agent import AgentRunner
from tests.support.sdk.runner import asker

GROUP = 3


async def main(file: str, items: int) -> None:
    async with asker() as one:

        async def agent(item: dict[str, Any]) -> float:
            await one.ask(item)
            await asyncio.sleep(random.uniform(0.0, 0.1))
            await one.ask(item)
            return float(item["number"])

        runner = AgentRunner(concurrency=7, group_size=GROUP, results=file, progress=False)
        data = [{"question": f"Say {number}.", "number": number} for number in range(items)]
        results = await runner.arun(agent, data)
    assert len(results) == items * GROUP and not results.failed


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
