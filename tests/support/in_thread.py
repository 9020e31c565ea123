"""A fake engine or provider in a thread, for tests without an event loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Protocol, TypeVar


class Serving(Protocol):
    """A server that ends with a context."""

    def serve(self) -> AbstractAsyncContextManager[Any]: ...


S = TypeVar("S", bound=Serving)


@contextmanager
def served_in_thread(server: S, *, within: float) -> Iterator[S]:
    """It serves when this is entered, and has ended when it is left; each in so many seconds."""
    serving, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with server.serve():
            serving.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert serving.wait(within)
    try:
        yield server
    finally:
        ended.set()
        thread.join(within)
