"""Running something until it ends or a signal ends it, with time to put things away."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


def run_until_signal(coroutine: Coroutine[Any, Any, None]) -> int | None:
    """Run it to its end. The number of the signal that ended it instead: Ctrl-C, SIGTERM, SIGHUP.

    It is cancelled by the first; another Ctrl-C interrupts also what it does then.
    """
    caught: list[int] = []

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def end(number: int) -> None:
            caught.append(number)
            task.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            # Who started this in the background with nohup wants it to outlive the terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, end, number)
        await coroutine

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        return signal.SIGINT
    except asyncio.CancelledError:
        if not caught:
            raise
        return caught[0]
    return None
