"""`FailureBudget`: counts failed episodes, logs each kind once, and ends the run after too many."""

from __future__ import annotations

import logging
import traceback
from typing import Final

import httpx

from any_agent.errors import AgentFailed, AnyAgentError, TrainingError
from any_agent.runtime.logs import Redactor, own_place

log = logging.getLogger(__name__)

_MAX_KINDS: Final = 256  # the number of kinds of failures that are logged in full
_MIN_DELAY, _MAX_DELAY = 0.1, 5.0
"""Seconds between two attempts while the service, not the episode, seems to fail."""
_TRANSIENT_STATUSES: Final = (429, 502, 503, 504)


class FailureBudget:
    """Counts failures in a row, without episodes that were running at the first of them.

    One event that hits every running episode, such as the death of a proxy, therefore ends no run,
    while an agent that always fails ends it after ``limit`` more failures.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._logged: set[tuple[str, str, str]] = set()
        self._begun = 0
        self._since: int | None = None
        """The number of the last episode that had begun when the first of the row failed."""
        self.in_a_row = 0
        self._tries = 0
        self.transient = False
        """True while the last failure looks like a service that will be back."""

    def begin(self) -> int:
        """Return the number of a new episode."""
        self._begun += 1
        return self._begun

    def succeeded(self) -> None:
        self._since = None
        self.in_a_row = self._tries = 0
        self.transient = False

    def failed(self, number: int, error: BaseException, name: str) -> TrainingError | None:
        """Count the failure of the episode ``name``; return the error that ends the run, if this
        failure was one too many."""
        self.log(error, name)
        self.transient = is_transient(error)
        if self._since is None:
            self._since = self._begun
            self.in_a_row = 1
        elif number > self._since:
            self.in_a_row += 1
        if self.in_a_row < self._limit:
            return None
        return TrainingError(
            f"{self.in_a_row} episodes in a row failed, the last one, {name}: "
            f"{format_error(error)}; the log has the trace. Training stops after "
            "rollout.max_failures of them"
        )

    def next_delay(self) -> float:
        """Return the seconds to wait before the next episode, while failures are transient."""
        self._tries += 1
        return float(min(_MAX_DELAY, _MIN_DELAY * 2 ** (self._tries - 1)))

    def log(self, error: BaseException, name: str) -> None:
        """Log a failure: in a line that a console shows, and, if it is the first of its kind, with
        its trace at the level `info`, which logs have."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        kind = (type(error).__name__, str(getattr(error, "code", "")), where)
        if kind in self._logged or len(self._logged) >= _MAX_KINDS:
            log.debug("%s failed: %s", name, format_error(error))
            return
        self._logged.add(kind)
        # An AgentFailed describes the agent's fault in full; its trace is not the agent's.
        by_agent = isinstance(error, AgentFailed)
        text = str(error) if by_agent else "".join(traceback.format_exception(error))
        said, _, more = text.partition("\n") if by_agent else (format_error(error), "", text)
        hints = getattr(error, "__notes__", ()) if by_agent else ()
        place = f" ({found})" if (found := own_place(more)) else ""
        log.warning(
            "%s failed and is left out; further failures like this one are only counted: %s%s",
            name,
            "; ".join((said, *hints)),
            place,
        )
        if more:
            log.info("%s failed there:\n%s", name, Redactor().text(more))


def format_error(error: BaseException) -> str:
    """Return the error and its notes in one line, without secrets."""
    notes = getattr(error, "__notes__", ())
    parts = (Redactor().text(" ".join(str(part).split()))[:500] for part in (error, *notes))
    text = "; ".join(filter(None, parts))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_transient(error: BaseException) -> bool:
    """Return True if the same episode may succeed later, as the service was away or busy."""
    if isinstance(error, AnyAgentError):
        return error.retryable
    if isinstance(error, ConnectionError | httpx.TransportError):
        return True
    # Errors of OpenAI's and Anthropic's SDKs, by name, so that they need no import.
    names = {kind.__name__ for kind in type(error).__mro__}
    status = getattr(error, "status_code", None)
    return "APIConnectionError" in names or status in _TRANSIENT_STATUSES
