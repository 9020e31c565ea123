"""How many train sessions may be admitted so that no token grows too old."""

from __future__ import annotations

from any_agent.config import RolloutConfig
from any_agent.protocol.rl import Capacity


def free_slots(now: Capacity, config: RolloutConfig) -> int:
    """Return how many sessions may be opened on top of the present ones.

    ``min(max_concurrent - running, (eta + 1) * batch_size - (running + buffered))``: a session
    that is admitted now is trained on at most eta steps after its weights. Slots that open groups
    have reserved count as running.
    """
    return _room(now.running + now.reserved, now.buffered, config.batch_size, config)


def _room(running: int, buffered: int, batch_sessions: int, config: RolloutConfig) -> int:
    """The formula of :func:`free_slots`, with all arguments in sessions."""
    ahead = (config.eta + 1) * batch_sessions
    return max(0, min(config.max_concurrent - running, ahead - (running + buffered)))


def stalled(now: Capacity, config: RolloutConfig) -> bool:
    """Return True if no batch is complete, and nothing is under way that could complete one.

    Groups that closed with fewer members can leave less room than the next group needs: then the
    next one must be admitted all the same, or nothing would ever move again.
    """
    return now.running + now.reserved == 0 and now.buffered < config.batch_size


class RolloutCounts:
    """Counts an executor's sessions, which decide on admission; used on its event loop alone."""

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self.admitted = 0
        """Train sessions ever begun."""
        self.running = 0
        self.buffered = 0
        """Sessions that ended with something to train on, and are not settled yet."""
        self.evaluating = 0
        """Running eval sessions; they have their own bound, as they are never trained on."""

    def begin(self, sessions: int, *, is_eval: bool) -> None:
        if is_eval:
            self.evaluating += sessions
            return
        self.admitted += sessions
        self.running += sessions

    def end(self, *, is_eval: bool, buffered: bool) -> None:
        """Count the end of one session, which is ``buffered`` if it may be trained on."""
        if is_eval:
            self.evaluating -= 1
            return
        self.running -= 1
        self.buffered += buffered

    def settle(self, sessions: int) -> None:
        """Remove buffered sessions that were trained on, or never will be."""
        self.buffered -= sessions

    def admits(self, sessions: int, batch_sessions: int, *, wanted: int = 0) -> bool:
        """Return True if so many more sessions may begin.

        ``wanted`` are sessions that a caller waits for beyond what training looks ahead. One more
        group than there is room for begins where otherwise nothing would ever move again.
        """
        free = _room(self.running, self.buffered - wanted, batch_sessions, self._config)
        stuck = self.running == 0 and self.buffered < batch_sessions + wanted
        return sessions <= free or stuck

    def admits_eval(self, sessions: int) -> bool:
        return self.evaluating == 0 or self.evaluating + sessions <= self._config.max_concurrent

    def capacity(self) -> Capacity:
        """Return the counts as a rank of a service reports them."""
        return Capacity(
            admitted=self.admitted,
            reserved=0,
            waiting=0,
            running=self.running,
            buffered=self.buffered,
            limit=self._config.max_concurrent,
        )
