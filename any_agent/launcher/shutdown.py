"""How a node ends: at once, or after what is under way."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from any_agent.launcher.component import Component
from any_agent.runtime.signals import handle_signals

STOP_GRACE = 4.0
"""Seconds for the trainer to finish its step, and again for all the others."""
_POLL_INTERVAL = 0.05
_ENDS = (signal.SIGINT, signal.SIGTERM)


class Terminated(SystemExit):
    """SIGTERM, raised in the main thread: the service is to drain, and the program to exit 0.

    ``within``: in so many seconds; None: as configured.
    """

    def __init__(self, within: float | None = None) -> None:
        super().__init__(0)
        self.within = within


def terminate(number: int, frame: FrameType | None) -> None:
    """A handler for SIGTERM."""
    raise Terminated


def stop(parts: Mapping[str, Component], close: Callable[[], None]) -> None:
    """End every process within seconds, for certain; the trainer first, while it has a service.

    It finishes the step under way and keeps a checkpoint, if its time is enough for that. Then the
    router, so that nothing new arrives, the proxies, and their engines last. ``close`` is called
    when the router ends: nobody is to wait for a next one.
    """
    with uninterrupted():
        _stop(_trainer(parts), STOP_GRACE)
        close()
        _stop(_router(parts), 0.25 * STOP_GRACE)
        _stop(_proxies(parts), 0.5 * STOP_GRACE)
        _stop(parts.values(), 0.25 * STOP_GRACE)


def drain(
    parts: Mapping[str, Component],
    close: Callable[[], None],
    within: float,
    *,
    trainer_within: float | None = None,
) -> bool:
    """Let what is under way end, up to ``within`` seconds; SIGTERM or Ctrl-C ends the wait.

    The router refuses new work from now on, while the trainer ends its step and keeps a checkpoint,
    for which it needs the proxies: for ``trainer_within`` seconds, or half of the time. These are
    told later, and answer long polls then. Afterwards
    :func:`stop` ends what is left. Whether requests ended by themselves: a router or a proxy that
    ends at its own time limit has cut some off.
    """
    with _hastened() as hurry:
        now = time.monotonic()
        trainer, front, proxies = _trainer(parts), _router(parts), _proxies(parts)
        for part in [*front, *trainer]:
            part.ask_to_drain()
        close()
        # Requests may wait for an answer that comes when the proxies are told to end.
        if trainer_within is None:
            trainer_within = max(0.5 * within, min(within, STOP_GRACE))
        _wait(trainer, now + trainer_within, hurry)
        for part in proxies:
            part.ask_to_drain()
        _wait([*front, *proxies], now + within, hurry)
        return not hurry.is_set() and time.monotonic() < now + within


def _trainer(parts: Mapping[str, Component]) -> list[Component]:
    return [part for part in parts.values() if part.kind == "trainer"]


def _router(parts: Mapping[str, Component]) -> list[Component]:
    return [part for part in parts.values() if part.kind == "router"]


def _proxies(parts: Mapping[str, Component]) -> list[Component]:
    return [part for part in parts.values() if part.kind == "rank"]


def _wait(parts: Iterable[Component], deadline: float, hurry: threading.Event) -> None:
    """Until all of these have ended."""
    waited_for = list(parts)
    while any(part.running for part in waited_for) and time.monotonic() < deadline:
        if hurry.wait(_POLL_INTERVAL):
            return


def _stop(parts: Iterable[Component], grace: float) -> None:
    """End these, all at once; SIGKILL for what is left after ``grace`` seconds."""
    asked = list(parts)
    for part in asked:
        part.ask_to_stop()
    deadline = time.monotonic() + grace
    for part in asked:
        part.stop(grace=max(0.0, deadline + part.grace - time.monotonic()))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let no second Ctrl-C, and no signal of Slurm, end the launcher before its children."""
    with handle_signals(signal.SIG_IGN, *_ENDS, signal.SIGUSR1, signal.SIGUSR2):
        yield


@contextmanager
def _hastened() -> Iterator[threading.Event]:
    """What is set by a signal that comes meanwhile, instead of its ending the launcher."""
    hurry = threading.Event()
    with handle_signals(lambda *_: hurry.set(), *_ENDS):
        yield hurry
