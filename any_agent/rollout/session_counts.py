"""How many sessions run and how many wait to be trained on: what admission is decided by."""

from __future__ import annotations

from any_agent.config import RolloutConfig
from any_agent.protocol.rl import Capacity
from any_agent.rollout.admission import room


class RolloutCounts:
    """Counts sessions of an executor; used on its event loop alone."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self.admitted = 0
        """Train sessions ever begun."""
        self.running = 0
        self.buffered = 0
        """Ended with something to train on, and not settled yet."""
        self.evaluating = 0
        """Eval sessions that run; bounded by themselves, as they are never trained on."""

    def begin(self, sessions: int, *, is_eval: bool) -> None:
        if is_eval:
            self.evaluating += sessions
            return
        self.admitted += sessions
        self.running += sessions

    def end(self, *, is_eval: bool, kept: bool) -> None:
        """One session ended; ``kept``: it may be trained on."""
        if is_eval:
            self.evaluating -= 1
            return
        self.running -= 1
        self.buffered += kept

    def settle(self, sessions: int) -> None:
        """So many of the buffered ones were trained on, or never will be."""
        self.buffered -= sessions

    def takes(self, sessions: int, batch_sessions: int, *, wanted: int = 0) -> bool:
        """Whether so many more may begin.

        ``wanted`` are sessions that somebody waits for beyond what training looks ahead. One more
        group than there is room for begins where otherwise nothing would ever move again.
        """
        c = self._config
        free = room(
            self.running,
            self.buffered - wanted,
            batch_size=batch_sessions,
            eta=c.eta,
            max_concurrent=c.max_concurrent,
        )
        stuck = self.running == 0 and self.buffered < batch_sessions + wanted
        return sessions <= free or stuck

    def takes_eval(self, sessions: int) -> bool:
        return self.evaluating == 0 or self.evaluating + sessions <= self._config.max_concurrent

    def now(self) -> Capacity:
        """As the ranks of a service say it."""
        return Capacity(
            admitted=self.admitted,
            reserved=0,
            waiting=0,
            running=self.running,
            buffered=self.buffered,
            limit=self._config.max_concurrent,
        )
