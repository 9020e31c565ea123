"""Counters over a rank's model calls since its process began: a few additions per call."""

from __future__ import annotations

import time
from collections import Counter
from typing import Literal, TypeAlias

from any_agent.completions.call_types import Completion, Prepared
from any_agent.runtime.metrics import Histogram
from any_agent.types import Continuation, SessionMode

CallOutcome: TypeAlias = Literal["completed", "aborted", "failed"]
RetryOutcome: TypeAlias = Literal["joined", "replayed", "recovered", "new"]

OTHER = "other"  # the label of the parameters beyond the first _MAX_NAMES names
NO_SESSION = "none"  # the mode label of calls without a session: inference, once training is over
FIRST = "first"  # the continuation label of a session's first call
_MAX_NAMES = 32
CALL_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
FIRST_TOKEN_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class CallStats:
    """Counters over calls, by the mode of their sessions where that matters."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, CallOutcome]] = Counter()
        self.seconds = Histogram(CALL_BOUNDS)
        """Seconds from the engine request until the answer is durable, of completed calls."""
        self.first_token_seconds = Histogram(FIRST_TOKEN_BOUNDS)
        """Seconds from the engine request until its first tokens, of streamed calls."""
        self.interactions: Counter[tuple[str, str]] = Counter()
        """Interactions by mode and by how the prompt continued the session's record."""
        self.branches: Counter[str] = Counter()
        """Calls that could not continue their parent exactly, by reason."""
        self.untrainable: Counter[str] = Counter()
        """Interactions of train sessions that are never trained on, by reason."""
        self.prompt_tokens: Counter[str] = Counter()
        self.output_tokens: Counter[str] = Counter()
        self.overrides: Counter[str] = Counter()
        """Calls in which the run's sampling replaced the agent's, by parameter."""
        self.ignored: Counter[str] = Counter()
        """Calls with an unknown parameter, by its name. Clients choose these names, so only the
        first ones are counted apart."""
        self.retries: Counter[RetryOutcome] = Counter()
        """Marked retries, by their outcome."""


class CallTimer:
    """The clock of one call, which adds it to the counters."""

    __slots__ = ("_began", "_ended", "_mode", "_prepared", "_stats", "_tokens_arrived")

    def __init__(self, stats: CallStats, prepared: Prepared, mode: str | None) -> None:
        self._stats = stats
        self._prepared = prepared
        self._mode = mode or NO_SESSION
        self._tokens_arrived = False
        self._ended = False
        self._began = time.perf_counter()

    def tokens_arrived(self) -> None:
        """Observe the time to the first tokens of a stream."""
        if not self._tokens_arrived:
            self._tokens_arrived = True
            self._stats.first_token_seconds.observe(time.perf_counter() - self._began)

    def completed(self) -> None:
        """Count a call whose choices are all durable."""
        stats = self._stats
        self.ended("completed")
        stats.seconds.observe(time.perf_counter() - self._began)
        stats.prompt_tokens[self._mode] += self._prepared.prompt_tokens
        for parameter in self._prepared.call.overrides:
            stats.overrides[parameter] += 1
        for name in self._prepared.call.ignored:
            known = name in stats.ignored or len(stats.ignored) < _MAX_NAMES
            stats.ignored[name if known else OTHER] += 1

    def recorded(self, completion: Completion, *, earlier: int | None) -> None:
        """Count a durable choice; ``earlier``: interactions that its session had before the call,
        None without a session."""
        stats, mode, interaction = self._stats, self._mode, completion.interaction
        stats.output_tokens[mode] += len(interaction.output_ids)
        if earlier is None:
            return
        if interaction.untrainable_reason is not None and mode == SessionMode.TRAIN:
            stats.untrainable[interaction.untrainable_reason] += 1
        how: str = interaction.continuation
        if interaction.branch_reason is not None:
            stats.branches[interaction.branch_reason] += 1
        if how == Continuation.ROOT and earlier == 0:
            how = FIRST
        stats.interactions[mode, how] += 1

    def ended(self, outcome: CallOutcome) -> None:
        """Count the call's end; later outcomes of the same call are ignored."""
        if not self._ended:
            self._ended = True
            self._stats.ended[self._mode, outcome] += 1
