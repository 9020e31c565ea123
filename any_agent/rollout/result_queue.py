"""`ResultQueue`: lets threads wait for the results of an executor's event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from any_agent.errors import TrainingError
from any_agent.rollout.failure_budget import format_error

T = TypeVar("T")

_AMBIGUOUS_ERRORS = (TimeoutError, InterruptedError, asyncio.CancelledError)
"""Errors that the caller of a wait would mistake for the end of the wait."""


class ResultQueue:
    """One condition for all waits on an executor; a failure or an interrupt ends them.

    Change the state that waits depend on inside ``with queue.changed``, and notify there.
    """

    def __init__(self, name: str, error_type: type[Exception] = TrainingError) -> None:
        """``name`` is the failed part in errors; ambiguous errors become an ``error_type``."""
        self.changed = threading.Condition()
        self._name = name
        self._error_type = error_type
        self._failure: BaseException | None = None
        self._failure_raised = False
        self._interrupted = False

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def fail(self, error: BaseException) -> None:
        """End all waits, now and from now on, with an error; the first one counts."""
        with self.changed:
            self._failure = self._failure or error
            self.changed.notify_all()

    def interrupt(self) -> None:
        """End all waits, now and from now on, by InterruptedError; safe in a signal handler."""
        self._interrupted = True
        # The handler may run in a thread that is about to wait, or while another one has the
        # lock: every wait checks the flag within a second.
        if self.changed.acquire(blocking=False):
            try:
                self.changed.notify_all()
            finally:
                self.changed.release()

    def check(self) -> None:
        """Raise the error that ended the executor, at the start of a call; TrainingError if an
        earlier call has raised that error."""
        if self._failure is not None and self._failure_raised and not self._interrupted:
            raise TrainingError(
                f"{self._name} has ended by the error of an earlier call: "
                f"{format_error(self._failure)}; create another WorkflowExecutor (or "
                "RemoteSGLangEngine)"
            ) from self._failure
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._interrupted:
            raise InterruptedError(f"{self._name} was interrupted")
        if self._failure is not None:
            self._failure_raised = True
            raise unambiguous(self._failure, self._name, self._error_type)

    def wait_for(
        self,
        ready: Callable[[], T | None],
        timeout: float | None,
        blocked: Callable[[], str | None] = lambda: None,
    ) -> T | None:
        """Wait until ``ready`` returns a result, and return it; None after ``timeout`` seconds.

        Raises the executor's failure, InterruptedError, and RuntimeError with the reason that
        ``blocked`` gives if a wait without a timeout would never end.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.changed:
            while True:
                self._raise_failure()
                result = ready()
                if result is not None:
                    return result
                if deadline is None and (reason := blocked()) is not None:
                    raise RuntimeError(reason)
                remaining = 1.0 if deadline is None else deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self.changed.wait(min(remaining, 1.0))


def unambiguous(
    error: BaseException, name: str, error_type: type[Exception] = TrainingError
) -> BaseException:
    """Return the error to raise from a wait: an error that would be mistaken for the end of the
    wait becomes the cause of another one, which names what failed."""
    if not isinstance(error, _AMBIGUOUS_ERRORS):
        return error
    failure = error_type(f"{name} failed: {error!r}")
    failure.__cause__ = error
    return failure
