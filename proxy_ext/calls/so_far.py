"""What a stream has produced, for a client that comes later."""

from __future__ import annotations

from array import array

from any_agent.chat import MessageDelta, merge_deltas
from any_agent.completions import Delta, PackedTop, top_logprobs_of
from any_agent.types import Interaction

_STEPS = 64
"""So many are put together at once: each takes more than its text."""


class SoFar:
    """Of one choice; a client that joins gets it as one delta.

    Nearly every stream of an SDK keeps one to its end, so it is kept small: steps are put together
    some at a time, and numbers are packed.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self.clear()

    def clear(self) -> None:
        """It is recorded, and replayed from there."""
        self._steps: list[MessageDelta] = []
        self._joined: list[MessageDelta] = []
        self._ids = array("i")
        self._logprobs = array("d")
        self._top: PackedTop | None = None

    @property
    def empty(self) -> bool:
        return not self._ids

    def add(self, item: Delta) -> None:
        self._steps.append(item.message)
        if len(self._steps) == _STEPS:
            self._joined.append(merge_deltas(self._steps))
            self._steps.clear()
        self._ids.extend(item.output_ids)
        self._logprobs.extend(item.logprobs)
        if item.top_logprobs is not None:
            self._top = self._top or PackedTop()
            self._top.extend(item.top_logprobs)

    def delta(self) -> Delta:
        message = merge_deltas([*self._joined, *self._steps])
        top = self._top.rows() if self._top is not None else None
        return Delta(message, self._ids.tolist(), self._logprobs.tolist(), top, self._index)


def whole(interaction: Interaction, index: int) -> Delta:
    """All of a recorded answer."""
    message = interaction.output_message
    calls = [{"index": k, **c} for k, c in enumerate(message.get("tool_calls") or ())]
    return Delta(
        MessageDelta(message.get("content"), message.get("reasoning_content"), calls or None),
        interaction.output_ids.tolist(),
        interaction.output_logprobs.tolist(),
        top_logprobs_of(interaction),
        index,
    )
