"""A fake engine that serves in a thread, for tests without an event loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from tests.support.scripted_engine import ScriptedEngine

E = TypeVar("E", bound=ScriptedEngine)


@contextmanager
def served_in_thread(engine: E, *, within: float) -> Iterator[E]:
    """It serves when this is entered, and has ended when it is left; each in so many seconds."""
    serving, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with engine.serve():
            serving.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert serving.wait(within)
    try:
        yield engine
    finally:
        ended.set()
        thread.join(within)
