"""The watch of an engine, which is asked all the time: a hung one takes calls and answers none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from any_agent.engine.sglang.requests import SGLangControl
from any_agent.errors import EngineUnavailable

INTERVAL = 1.0
ANSWER_WITHIN = 2.0
"""Seconds; with the interval and a rank's heartbeat, the router knows within five."""
LATE = 1.0
"""Seconds after its time limit at which a request ends because this process hung itself."""


async def silences(control: SGLangControl) -> AsyncGenerator[float | None]:
    """Yield after each question for how many seconds the engine has been silent.

    0.0: it answered, by whatever status. None: nothing listens at its address.

    The question is for `/model_info`, which SGLang's HTTP process answers without its scheduler,
    and the embedded engine without its model: long prefills, compilation and the load of weights
    are no silence. SGLang's own watchdog ends a server whose scheduler hangs.
    """
    silence = 0.0
    while True:
        await asyncio.sleep(INTERVAL)
        asked = time.monotonic()
        try:
            answered = await control.answers("/model_info", within=ANSWER_WITHIN)
        except EngineUnavailable:
            silence = 0.0
            yield None
            continue
        passed = time.monotonic() - asked
        if answered:
            silence = 0.0
        elif passed < ANSWER_WITHIN + LATE:
            silence += passed + INTERVAL
        yield silence
