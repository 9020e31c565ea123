"""The output of a stream so far, kept for a client that joins later: its parts in order."""

from __future__ import annotations

from array import array
from itertools import groupby

from any_agent.chat import MessageDelta, merge_deltas
from any_agent.completions.call_types import Delta
from any_agent.completions.encoders.output_order import OutputPart, parts_of
from any_agent.completions.logprobs import PackedTopLogprobs, top_logprobs_of
from any_agent.types import Interaction

_MAX_STEPS = 64  # deltas kept apart before they are joined: each takes more than its text


class StreamBuffer:
    """The buffer of one choice; a client that joins gets one delta for each part.

    Nearly every stream of an SDK has one to its end, so it is kept small: deltas are joined some at
    a time, and numbers are packed.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self.clear()

    def clear(self) -> None:
        """Drop everything: the answer is recorded, and replayed from there."""
        self._steps: list[MessageDelta] = []
        """Deltas of the last part that are not joined yet."""
        self._part: str | int | None = None
        self._end = 0
        """Number of tokens at the last delta."""
        self._joined: list[tuple[str | int | None, MessageDelta, int]] = []
        """A part, some joined deltas of it, and the number of tokens at their end."""
        self._ids = array("i")
        self._logprobs = array("d")
        self._top: PackedTopLogprobs | None = None

    def add(self, item: Delta) -> None:
        self._ids.extend(item.output_ids)
        self._logprobs.extend(item.logprobs)
        if item.top_logprobs is not None:
            self._top = self._top or PackedTopLogprobs()
            self._top.extend(item.top_logprobs)
        part = _part_of(item.message)
        if part is None:
            return
        if part != self._part or len(self._steps) == _MAX_STEPS:
            self._join()
        self._part = part
        self._steps.append(item.message)
        self._end = len(self._ids)

    def deltas(self) -> list[Delta]:
        """Return the parts, each with the tokens up to its end; last, tokens without text."""
        self._join()
        ids, logprobs = self._ids.tolist(), self._logprobs.tolist()
        top = self._top.rows() if self._top is not None else None
        out, start = [], 0
        for _, steps in groupby(self._joined, key=lambda joined: joined[0]):
            each = list(steps)
            message, end = merge_deltas(step for _, step, _ in each), each[-1][2]
            rows = None if top is None else top[start:end]
            out.append(Delta(message, ids[start:end], logprobs[start:end], rows, self._index))
            start = end
        if start < len(ids):
            rows = None if top is None else top[start:]
            out.append(Delta(MessageDelta(), ids[start:], logprobs[start:], rows, self._index))
        return out

    def _join(self) -> None:
        if self._steps:
            self._joined.append((self._part, merge_deltas(self._steps), self._end))
            self._steps.clear()


def recorded_deltas(interaction: Interaction, index: int) -> list[Delta]:
    """Return a recorded answer part by part; all of its tokens come with the first."""
    parts = parts_of(interaction)
    calls = 0
    messages: list[MessageDelta] = []
    for part in parts:
        messages.append(_message(part, calls))
        calls += part.call is not None
    first = Delta(
        messages[0] if messages else MessageDelta(),
        interaction.output_ids.tolist(),
        interaction.output_logprobs.tolist(),
        top_logprobs_of(interaction),
        index,
        calls=calls > 0,
    )
    return [first, *[Delta(message, [], [], None, index) for message in messages[1:]]]


def _part_of(step: MessageDelta) -> str | int | None:
    """Return what identifies a delta's part: the kind of a text, or the index of a tool call."""
    if step.tool_calls:
        number: int = step.tool_calls[-1]["index"]
        return number
    if step.content:
        return "content"
    return "reasoning" if step.reasoning_content else None


def _message(part: OutputPart, number: int) -> MessageDelta:
    if part.call is not None:
        return MessageDelta(tool_calls=[{"index": number, **part.call}])
    if part.kind == "content":
        return MessageDelta(part.text)
    return MessageDelta(reasoning_content=part.text)
