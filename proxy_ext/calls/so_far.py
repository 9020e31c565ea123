"""What a stream has produced, for a client that comes later."""

from __future__ import annotations

from any_agent.chat import MessageDelta
from any_agent.chat.output.message import merge_deltas
from any_agent.completions import Delta, TopLogprobs, unpack_top_logprobs
from any_agent.types import Interaction


class SoFar:
    """Of one choice; a client that joins gets it as one delta."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.clear()

    def clear(self) -> None:
        """It is recorded, and replayed from there."""
        self._messages: list[MessageDelta] = []
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: TopLogprobs | None = None

    @property
    def empty(self) -> bool:
        return not self._ids

    def add(self, item: Delta) -> None:
        self._messages.append(item.message)
        self._ids += item.output_ids
        self._logprobs += item.logprobs
        if item.top_logprobs is not None:
            self._top = (self._top or []) + item.top_logprobs

    def delta(self) -> Delta:
        message = merge_deltas(self._messages)
        return Delta(message, list(self._ids), list(self._logprobs), self._top, self._index)


def whole(interaction: Interaction, index: int) -> Delta:
    """All of a recorded answer."""
    message = interaction.output_message
    calls = [{"index": k, **c} for k, c in enumerate(message.get("tool_calls") or ())]
    top = interaction.request.get("top_logprobs")
    return Delta(
        MessageDelta(message.get("content"), message.get("reasoning_content"), calls or None),
        interaction.output_ids.tolist(),
        interaction.output_logprobs.tolist(),
        unpack_top_logprobs(top) if top is not None else None,
        index,
    )
