"""Stop strings that begin before a weight update and end after it.

An engine that continues from prompt + partial output looks for stop strings in its new output only,
and would miss one that began in the old output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from any_agent.types import GenerationChunk

_BROKEN = "\ufffd"


class ResumedStopMatcher:
    """Ends the new output at the first token that completes a stop string begun in the old one.

    ``before`` has the output ids of the old weights. Only their end is decoded, and nothing more
    once the new text is as long as the longest stop string: from then on the engine finds every
    match itself.
    """

    def __init__(
        self, before: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._stops = stops
        self._decode = decode
        self._longest = max(map(len, stops), default=0)
        # A character has up to four bytes, and a byte can be a token.
        self._left = 4 * (self._longest + 1)
        self._ids = list(before[-self._left :]) if stops else []
        text = decode(self._ids) if self._ids else ""
        self._tail = text.rstrip(_BROKEN)
        # A character cut between its bytes begins before the seam and shows after it.
        self._straddles = text != self._tail
        self._done = not (self._tail or self._straddles)

    def cut(self, chunk: GenerationChunk) -> GenerationChunk:
        """Return the chunk, cut after the stop string that ends in it, if any."""
        for k, token in enumerate(chunk.output_ids):
            if self._done:
                break
            self._ids.append(token)
            text = self._decode(self._ids)
            stop = self._match(text)
            if stop is not None:
                self._done = True
                return replace(
                    chunk,
                    output_ids=chunk.output_ids[: k + 1],
                    logprobs=chunk.logprobs[: k + 1],
                    versions=chunk.versions[: k + 1],
                    top_logprobs=chunk.top_logprobs and chunk.top_logprobs[: k + 1],
                    bound=chunk.bound and chunk.bound[: k + 1],
                    stop_reason="stop",
                    matched_stop=stop,
                )
            # Bytes that make no character never lengthen the text, so the ids are counted, too.
            self._left -= 1
            length = len(text.rstrip(_BROKEN)) - len(self._tail)
            self._done = length >= self._longest or self._left == 0
        return chunk

    def _match(self, text: str) -> str | None:
        """Return the stop string that begins before the seam and ends after it."""
        seam = len(self._tail)
        for stop in self._stops:
            at = text.find(stop, max(0, seam - len(stop) + 1))
            begins_before = at < seam or (self._straddles and at == seam)
            if at >= 0 and begins_before and at + len(stop) > seam:
                return stop
        return None
