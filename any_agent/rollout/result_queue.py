"""Where the event loop leaves what is done, and callers on other threads wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from any_agent.errors import TrainingError
from any_agent.rollout.failure_budget import said
from any_agent.rollout.jobs import EpisodeJob
from any_agent.workflow.base import TensorDict

T = TypeVar("T")

_AMBIGUOUS_ERRORS = (TimeoutError, InterruptedError)


class ResultQueue:
    """Submitted jobs and their results; ends all waits when the executor fails or is interrupted.

    Change what it holds inside ``with board.news`` and notify there.
    """

    def __init__(self) -> None:
        self.news = threading.Condition()
        self.jobs: dict[int, EpisodeJob] = {}
        """Submitted and not handed out, by number, in the order of their submission."""
        self.done: dict[int, TensorDict | None] = {}
        """Results of those that have ended; None for rejected ones."""
        self.paused = False
        self._failure: BaseException | None = None
        self._told = False
        """Some call has raised the failure."""
        self._interrupted = False

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def fail(self, error: BaseException) -> None:
        """End all waits, now and from now on, with an error; the first one counts."""
        with self.news:
            self._failure = self._failure or error
            self.news.notify_all()

    def interrupt(self) -> None:
        """End all waits, now and from now on, by InterruptedError; safe in a signal handler."""
        self._interrupted = True
        # The thread that the signal came to may be the one that holds the lock: it looks again
        # within a second.
        if self.news.acquire(blocking=False):
            try:
                self.news.notify_all()
            finally:
                self.news.release()

    def check(self) -> None:
        """Raises what ended the executor; for a call that begins, TrainingError if an earlier one
        has raised it."""
        if self._failure is not None and self._told and not self._interrupted:
            raise TrainingError(
                "the executor ended in an earlier call, by the error of that one: "
                f"{said(self._failure)}; make another WorkflowExecutor (or RemoteSGLangEngine)"
            ) from self._failure
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._interrupted:
            raise InterruptedError("the executor was interrupted")
        if self._failure is not None:
            self._told = True
            raise unmistakable(self._failure, "the executor")

    def wait_for(
        self, ready: Callable[[], T | None], timeout: float | None, idle: Callable[[], bool]
    ) -> T | None:
        """What is ``ready``, once it is; None after ``timeout`` seconds.

        Raises RuntimeError where it would wait for ever: while it is paused and ``idle``.
        """
        self.check()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.news:
            while True:
                self._raise_failure()
                found = ready()
                if found is not None:
                    return found
                if self.paused and deadline is None and idle():
                    raise RuntimeError(
                        "the executor is paused, and what is waited for has not begun: call "
                        "resume() first"
                    )
                remaining = 1.0 if deadline is None else deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self.news.wait(min(remaining, 1.0))


def unmistakable(error: BaseException, what: str) -> BaseException:
    """Return what a wait raises for an error: one that would be taken for the end of the wait is
    the cause of a TrainingError, which says that ``what`` failed."""
    if not isinstance(error, _AMBIGUOUS_ERRORS):
        return error
    told = TrainingError(f"{what} failed: {error!r}")
    told.__cause__ = error
    return told
