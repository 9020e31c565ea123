"""Stop strings across the seam of a weight update.

An engine that goes on with prompt + partial output looks for stop strings in its new output only;
one that began in the old output would be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from any_agent.types import GenerationChunk


def cut_at_seam(
    chunk: GenerationChunk,
    before: Sequence[int],
    seam: int,
    stops: Sequence[str],
    decode: Callable[[Sequence[int]], str],
) -> GenerationChunk:
    """End a chunk at the first token that completes a stop string begun before the seam.

    ``before`` are the output ids so far, ``seam`` how many of them the old weights sampled.
    A chunk without such a token comes back as it is.
    """
    longest = max(map(len, stops))
    old = decode(before[:seam])
    tail = old[-(longest - 1) :] if longest > 1 else ""
    if not tail:
        return chunk
    fresh = list(before[seam:])
    # Only a stop string that starts in the old tail concerns us: once the new text is as long
    # as the longest one, the engine sees every further match by itself.
    if len(decode([*before[:seam], *fresh])) - len(old) >= longest:
        return chunk
    for k, token in enumerate(chunk.output_ids):
        fresh.append(token)
        text = tail + decode([*before[:seam], *fresh])[len(old) :]
        for stop in stops:
            at = text.find(stop)
            if 0 <= at < len(tail) < at + len(stop):
                return replace(
                    chunk,
                    output_ids=chunk.output_ids[: k + 1],
                    logprobs=chunk.logprobs[: k + 1],
                    versions=chunk.versions[: k + 1],
                    stop_reason="stop",
                    matched_stop=stop,
                )
        if len(text) - len(tail) >= longest:
            return chunk
    return chunk
