"""Episodes that fail: told of once, left out, and too many in a row end the run."""

from __future__ import annotations

import logging
import traceback
from typing import Final

import httpx

from any_agent.errors import AgentFailed, AnyAgentError, TrainingError
from any_agent.runtime.logs import Redactor

log = logging.getLogger(__name__)

_KINDS: Final = 256
"""Kinds of failures that are told of by themselves."""
_SHORTEST, _LONGEST = 0.1, 5.0
"""Seconds between two tries while the service, and not the episode, seems to be what fails."""
_RETRY_AFTER: Final = (429, 502, 503, 504)


class FailureBudget:
    """Counts failures in a row; what was under way when the first of them came does not count.

    So one event that hits every running episode, such as a proxy that dies, ends nothing, while
    an agent that always fails ends the run after ``most`` more.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._told: set[tuple[str, str, str]] = set()
        self._begun = 0
        self._since: int | None = None
        """The number of the last episode that had begun when the first one of the row failed."""
        self.in_a_row = 0
        self._tries = 0
        self._passing = False

    def begin(self) -> int:
        """The number of an episode that begins now."""
        self._begun += 1
        return self._begun

    def succeeded(self) -> None:
        self._since = None
        self.in_a_row = self._tries = 0
        self._passing = False

    def failed(self, number: int, error: BaseException, what: str) -> TrainingError | None:
        """What ends the run, if this one does; ``what`` names the episode."""
        self.tell(error, what)
        self._passing = is_passing(error)
        if self._since is None:
            self._since = self._begun
            self.in_a_row = 1
        elif number > self._since:
            self.in_a_row += 1
        if self.in_a_row < self._most:
            return None
        return TrainingError(
            f"{self.in_a_row} episodes in a row failed, the last one, {what}: {said(error)}; "
            "see the log for where. training stops after rollout.max_failures of them"
        )

    def pause(self) -> float:
        """Seconds to wait before one more episode is begun; 0 if nothing speaks against it."""
        if not self._passing:
            return 0.0
        self._tries += 1
        return float(min(_LONGEST, _SHORTEST * 2 ** (self._tries - 1)))

    @property
    def passing(self) -> bool:
        """Whether what failed last looks like a service that will be back."""
        return self._passing

    def tell(self, error: BaseException, what: str) -> None:
        """Log it, with its trace if it is the first of its kind."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        kind = (type(error).__name__, str(getattr(error, "code", "")), where)
        if kind in self._told or len(self._told) >= _KINDS:
            log.debug("%s failed: %s", what, said(error))
            return
        self._told.add(kind)
        # What the agent did wrong is told in full by the error itself; the frames are ours.
        agents = isinstance(error, AgentFailed)
        log.warning(
            "%s failed and is left out; the next ones that fail there like this are only counted%s",
            what,
            f": {'; '.join((str(error), *getattr(error, '__notes__', ())))}" if agents else "",
            exc_info=None if agents else error,
        )


def said(error: BaseException) -> str:
    """The error in a line, its notes too."""
    notes = getattr(error, "__notes__", ())
    parts = (Redactor().text(" ".join(str(part).split()))[:500] for part in (error, *notes))
    text = "; ".join(filter(None, parts))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_passing(error: BaseException) -> bool:
    """Whether the same episode may succeed later: the service was away, busy or not reached."""
    if isinstance(error, AnyAgentError):
        return error.retryable
    if isinstance(error, ConnectionError | httpx.TransportError):
        return True
    # The SDKs of OpenAI and Anthropic, without importing them.
    names = {kind.__name__ for kind in type(error).__mro__}
    return "APIConnectionError" in names or getattr(error, "status_code", None) in _RETRY_AFTER
