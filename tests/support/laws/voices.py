"""An engine without HTTP that says what it is told, in chunks of any size."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Sequence

from any_agent.completions.call_types import Completion, Delta, Prepared
from any_agent.completions.completer import Completer
from any_agent.engine import Capabilities
from any_agent.record import InteractionTree
from any_agent.types import GenerationChunk, ModelRequest, StopReason


class Voice:
    """Speaks the ids that ``answer`` gives for a request, and ends as SGLang would."""

    def __init__(self, decode: Callable[[Sequence[int]], str], rng: random.Random) -> None:
        self.version = 0
        self.answer: Callable[[ModelRequest], list[int]] = lambda _: []
        self.seen: dict[str, list[int]] = {}
        """Prompt ids by request."""
        self.said: dict[str, list[int]] = {}
        self._decode = decode
        self._rng = rng

    async def generate(
        self, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[GenerationChunk]:
        self.seen[request.rid] = [int(i) for i in request.input_ids]
        ids, reason, matched = self._ended(request, self.answer(request))
        self.said[request.rid] = ids
        while True:
            size = self._rng.choice((1, 1, 2, 3, 8)) if stream else len(ids)
            piece, ids = ids[:size], ids[size:]
            end = reason if not ids else None
            yield GenerationChunk(
                piece,
                [-1.0 - (i % 5) / 4 for i in piece],
                [self.version] * len(piece),
                end,
                matched if end else None,
            )
            if end:
                return

    def _ended(
        self, request: ModelRequest, answer: list[int]
    ) -> tuple[list[int], StopReason, str | int | None]:
        asked = request.gconfig
        for n, token in enumerate(answer, 1):
            if token in asked.stop_token_ids:
                return answer[:n], "stop", token
            if asked.stop:
                text = self._decode(answer[:n])
                matched = next((s for s in asked.stop if s in text), None)
                if matched is not None:
                    return answer[:n], "stop", matched
            if n >= asked.max_new_tokens:
                return answer[:n], "length", None
        return answer, "length", None

    async def capabilities(self) -> Capabilities:
        return Capabilities()

    async def pause(self) -> None: ...

    async def resume(self, version: int) -> None:
        self.version = version


async def sampled(
    completer: Completer, prepared: Prepared, tree: InteractionTree, *, stream: bool
) -> tuple[Completion, list[Delta]]:
    """A call's end, which the tree has then, and what came before it."""
    deltas: list[Delta] = []
    async for item in completer.run(prepared, session_id="s", stream=stream):
        if isinstance(item, Completion):
            tree.add(item.interaction, item.key)
            return item, deltas
        deltas.append(item)
    raise AssertionError("a call ends with its completion")
