"""The end of a node: at once, or after its parts have finished their work."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import FrameType

from any_agent.launcher.component import Component
from any_agent.runtime.signals import handle_signals

STOP_GRACE = 4.0
"""Seconds for the trainer to finish its step, and again for all other parts together."""
_POLL_INTERVAL = 0.05
_ENDS = (signal.SIGINT, signal.SIGTERM)


class Terminated(SystemExit):
    """The exit at SIGTERM, raised in the main thread: the service drains, and the exit code is 0.

    ``within``: seconds for the drain; None: as configured.
    """

    def __init__(self, within: float | None = None) -> None:
        super().__init__(0)
        self.within = within


def terminate(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM."""
    raise Terminated


def stop(parts: Mapping[str, Component], close: Callable[[], None]) -> None:
    """End every process within seconds; the trainer first, while it has a service.

    The trainer finishes its step and writes a checkpoint, if the time is enough. Then the router
    ends, so that nothing new arrives, then the proxies, and the engines last. ``close`` is called
    when the router ends, so that no client waits for another one. Call it :func:`uninterrupted`.
    """
    _stop(_of_kind(parts, "trainer"), STOP_GRACE)
    close()
    _stop(_of_kind(parts, "router"), 0.25 * STOP_GRACE)
    _stop(_of_kind(parts, "rank"), 0.5 * STOP_GRACE)
    _stop(list(parts.values()), 0.25 * STOP_GRACE)


def drain(
    parts: Mapping[str, Component],
    close: Callable[[], None],
    within: float,
    *,
    trainer_within: float | None = None,
) -> bool:
    """Let running work end, up to ``within`` seconds; SIGTERM or Ctrl-C ends the wait.

    The router refuses new work from now on, while the trainer finishes its step and writes a
    checkpoint, for which it needs the proxies: for ``trainer_within`` seconds, or half of the time.
    Then the proxies are signalled, and answer long polls. Afterwards :func:`stop` ends the rest.

    Returns whether all requests ended by themselves: a router or a proxy that ends at its own time
    limit has cut some off.
    """
    # A signal sets the event, instead of ending the launcher.
    interrupted = threading.Event()
    with handle_signals(lambda *_: interrupted.set(), *_ENDS):
        now = time.monotonic()
        router, trainer = _of_kind(parts, "router"), _of_kind(parts, "trainer")
        proxies = _of_kind(parts, "rank")
        for part in [*router, *trainer]:
            part.drain()
        close()
        # Requests may wait for an answer that comes when the proxies are signalled.
        if trainer_within is None:
            trainer_within = max(0.5 * within, min(within, STOP_GRACE))
        _wait(trainer, now + trainer_within, interrupted)
        for part in proxies:
            part.drain()
        _wait([*router, *proxies], now + within, interrupted)
        return not interrupted.is_set() and time.monotonic() < now + within


def _of_kind(parts: Mapping[str, Component], kind: str) -> list[Component]:
    return [part for part in parts.values() if part.kind == kind]


def _wait(parts: Iterable[Component], deadline: float, interrupted: threading.Event) -> None:
    """Wait until all of these have ended."""
    parts = list(parts)
    while any(part.running for part in parts) and time.monotonic() < deadline:
        if interrupted.wait(_POLL_INTERVAL):
            return


def _stop(parts: list[Component], grace: float) -> None:
    """End these parts at the same time; kill those that are left after ``grace`` seconds."""
    for part in parts:
        part.terminate()
    deadline = time.monotonic() + grace
    for part in parts:
        part.stop(grace=max(0.0, deadline + part.grace - time.monotonic()))


def uninterrupted() -> AbstractContextManager[None]:
    """Ignore Ctrl-C and Slurm's signals inside the block, so that all children are ended."""
    return handle_signals(signal.SIG_IGN, *_ENDS, signal.SIGUSR1, signal.SIGUSR2)
