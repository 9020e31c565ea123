"""Give the policy's events to LiteLLM's callbacks: ``python -m proxy_ext.litellm_teller``.

A rank starts it and writes to its standard input: a line with settings, then an event a line. For
each event it writes a line, ``told`` or ``failed``; for a line ``metrics``, one with the metrics of
LiteLLM's callback for Prometheus. In a process of its own, because a callback may
block, and costs more CPU than the call that it is told of.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Any

import orjson

from any_agent.runtime.logs import set_up_logging
from any_agent.runtime.metrics import RegisteredMetrics
from proxy_ext import litellm_policy
from proxy_ext.litellm_policy import METRICS_PREFIX, PolicyEvent

log = logging.getLogger(__name__)

_AT_ONCE = 8
_TIMEOUT = 30.0  # seconds that the callbacks may take for one event
MAX_LINE = 64 * 2**20
"""The most bytes of a line."""
METRICS = b"metrics"


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(MAX_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    # Callbacks may print: the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    settings = orjson.loads(await reader.readline())
    set_up_logging(
        settings["log_level"],
        settings["log_format"],
        part=settings["part"],
        secrets=settings["secrets"],
    )
    await litellm_policy.load_callbacks(settings["path"])
    answers.write(b"ready\n")
    room = asyncio.Semaphore(_AT_ONCE)

    async def tell(event: PolicyEvent) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT):
                await litellm_policy.tell(event, *settings["prices"])
            outcome = b"told\n"
        except Exception as error:
            log.warning("LiteLLM's callbacks failed: %s: %s", type(error).__name__, error)
            outcome = b"failed\n"
        finally:
            room.release()
        answers.write(outcome)

    async def show_metrics() -> None:
        collector = RegisteredMetrics(METRICS_PREFIX, f"{settings['part']} callbacks")
        text = await asyncio.to_thread(collector.render)
        answers.write(METRICS + orjson.dumps(text.decode()) + b"\n")

    tasks: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        if line.strip() == METRICS:
            task = asyncio.create_task(show_metrics())
        else:
            await room.acquire()
            told: dict[str, Any] = orjson.loads(line)
            task = asyncio.create_task(tell(PolicyEvent(**told)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    await litellm_policy.flush_callbacks()


if __name__ == "__main__":
    asyncio.run(_serve())
