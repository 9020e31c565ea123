"""The sessions that batches took: remembered, so that none has an effect twice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from any_agent.rollout import Consumed

_REMEMBERED = 65_536
"""Ids kept: many times what can be finalized and not yet acknowledged."""


class ConsumedSessions(dict[str, Consumed]):
    """What became of each session, the oldest first."""

    def add(self, trained: Iterable[str], rejected: Mapping[str, str], step: int | None) -> None:
        """This step, or none, took these; those rejected with their reasons."""
        self |= {id: Consumed(step) for id in trained}
        self |= {id: Consumed(step, why) for id, why in rejected.items()}
        while len(self) > _REMEMBERED:
            del self[next(iter(self))]

    def dump(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "consumed": {id: taken.rejected for id, taken in self.items()},
            "steps": {id: taken.step for id, taken in self.items() if taken.step is not None},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Add what :meth:`dump` wrote; without ``steps``, an earlier version did."""
        steps = state.get("steps", {})
        self |= {id: Consumed(steps.get(id), why) for id, why in state["consumed"].items()}
