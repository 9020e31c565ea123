"""Groups that have nothing to learn from: found, and counted while they are consecutive."""

from __future__ import annotations

from collections import Counter

from any_agent.config import TrainConfig
from trainer.advantage import estimate_advantages
from trainer.batch import Group, session_rewards


class ZeroVarianceGroups:
    """Counts consecutive groups that were left out, by reason."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.consecutive = 0
        self._reasons: Counter[str] = Counter()
        self._score: float | None = None
        """The score of the last group whose runs all scored the same."""

    def reject_reason(self, group: Group) -> str | None:
        """Return why a group has nothing to learn from, None for one that is trained on; count it.

        `untrainable`: no interaction counts; `zero_variance`: all sessions have the same score.
        """
        rewards = [session_rewards(session, self._config.discount) for session in group]
        scores = [r.score for r in rewards if r.score is not None]
        if not scores:
            reason = "untrainable"
        elif estimate_advantages([rewards], self._config)[0].zero_variance:
            reason = "zero_variance"
        else:
            self.reset()
            return None
        if scores:
            self._score = scores[0]
        self.count(reason)
        return reason

    def reset(self) -> None:
        """Begin anew: a group that can be trained on came."""
        self.consecutive = 0
        self._reasons.clear()
        self._score = None

    def count(self, reason: str) -> None:
        """Count one more group that was left out for ``reason``."""
        self.consecutive += 1
        self._reasons[reason] += 1

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common())
        text = f"{self.consecutive} groups in a row had nothing to learn from ({reasons})"
        if self._score is not None:
            text += f": all runs of an item score the same, in the last group {self._score:g}"
        return text
