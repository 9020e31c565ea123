"""Groups that teach nothing, one after the other: counted, and told of in words."""

from __future__ import annotations

from collections import Counter

from any_agent.config import TrainConfig
from trainer.batch import Group, session_rewards, without_signal


class ZeroVarianceGroups:
    """How many groups in a row were left out because there is nothing to learn from them."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self.in_a_row = 0
        self._reasons: Counter[str] = Counter()
        self._score: float | None = None
        """Of the last group whose runs scored the same."""

    def without_signal(self, group: Group) -> str | None:
        """As the function of this name; counted."""
        reason = without_signal(group, self._config)
        if reason is None:
            self.lively()
        else:
            scores = [session_rewards(one, self._config.discount).score for one in group]
            self._score = next((score for score in scores if score is not None), self._score)
            self.dull(reason)
        return reason

    def lively(self) -> None:
        """A group that can be trained on came."""
        self.in_a_row = 0
        self._reasons.clear()
        self._score = None

    def dull(self, reason: str) -> None:
        """A group was left out for this."""
        self.in_a_row += 1
        self._reasons[reason] += 1

    def __str__(self) -> str:
        why = ", ".join(f"{count} {reason}" for reason, count in self._reasons.most_common())
        said = f"{self.in_a_row} groups in a row had nothing to learn from ({why})"
        if self._score is not None:
            said += f": all runs of an item score the same, in the last group {self._score:g}"
        return said
