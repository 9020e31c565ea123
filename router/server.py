"""A router's life on an event loop of its own: it ends by signals, and drains first."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from router.app import Router


def serve(running: Callable[[], AbstractAsyncContextManager[Router]], drain_timeout: float) -> None:
    """Run the router until SIGTERM, after which what is under way has ``drain_timeout`` seconds, or
    until SIGINT. Outside of the main thread no signal is heard."""
    import uvloop

    async def main() -> None:
        drain, stop = asyncio.Event(), asyncio.Event()

        def asked() -> None:
            # The second time it is to be at once.
            (stop if drain.is_set() else drain).set()

        def at_once() -> None:
            drain.set()
            stop.set()

        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, asked)
            loop.add_signal_handler(signal.SIGINT, at_once)
        async with running() as router:
            # What is there now stays, so the garbage collector need not walk it again and again.
            gc.collect()
            gc.freeze()
            # And requests leave few cycles behind.
            gc.set_threshold(10_000, 20, 20)
            await drain.wait()
            stopped = asyncio.create_task(stop.wait())
            drained = asyncio.create_task(router.drain(drain_timeout))
            await asyncio.wait({stopped, drained}, return_when=asyncio.FIRST_COMPLETED)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
