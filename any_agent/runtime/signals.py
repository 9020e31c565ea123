"""Processes and signals: run until one arrives, handle them inside a block, end a child with its
parent, hide a process's memory."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

Handler = signal.Handlers | Callable[[int, FrameType | None], Any]


def run_until_signal(coroutine: Coroutine[Any, Any, None]) -> int | None:
    """Run a coroutine to its end; return the number of the signal that ended it, else None.

    Ctrl-C, SIGTERM and SIGHUP cancel it. A second Ctrl-C also interrupts its clean-up.
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
            # A program that was started with nohup is meant to outlive its terminal.
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


@contextmanager
def handle_signals(handler: Handler, *numbers: int) -> Iterator[None]:
    """Handle these signals with ``handler`` inside the block, and as before after it.

    Outside the main thread, where no signal arrives, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def exit_by_signal(number: int, frame: FrameType | None = None) -> NoReturn:
    """Raise SystemExit with the exit code that shells expect of a signal."""
    raise SystemExit(128 + number)


def interrupt(number: int, frame: FrameType | None = None) -> NoReturn:
    """Raise KeyboardInterrupt, as Ctrl-C does."""
    raise KeyboardInterrupt


_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
# Looked up at import: after a fork, a lock of the library loader that another thread holds is never
# released.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def hide_from_others() -> None:
    """Keep this process's memory and environment from other processes of its user.

    Linux only, and not from root. A program that it starts is visible again.
    """
    if _prctl is not None:
        _prctl(_PR_SET_DUMPABLE, 0)


def die_with_parent(parent: int, number: int) -> None:
    """Ask for this signal when ``parent`` dies; call it in the child, before its program starts.

    Only Linux offers this; elsewhere the child must be ended with its parent by hand.
    """
    # A shell starts background jobs with SIGINT ignored, which would be inherited.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        # The parent died before the line above: the signal will not come any more.
        os._exit(1)
