"""What the service asks of an inference engine, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from any_agent.types import GenerationChunk, ModelRequest, ModelResponse


class InferenceEngine(Protocol):
    """Token ids in, token ids with log-probabilities and versions out."""

    @property
    def version(self) -> int:
        """The weight version that newly started tokens are sampled with."""
        ...

    def generate(self, request: ModelRequest, *, stream: bool) -> AsyncGenerator[GenerationChunk]:
        """Sample a completion; the last chunk alone has a stop reason.

        With ``stream`` a chunk comes as soon as its tokens exist. Closing the iterator cancels
        the request in the engine. A weight update in between, or a restart of the engine, is not
        visible here, except in the tokens' versions.

        Raises EngineUnavailable (an update or a restart took too long), InvalidRequest.
        """
        ...

    async def pause(self) -> None:
        """Stop sampling; requests under way are kept and wait."""
        ...

    async def resume(self, version: int) -> None:
        """Go on with the weights of ``version``."""
        ...


async def agenerate(engine: InferenceEngine, request: ModelRequest) -> ModelResponse:
    """The whole completion of one request."""
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    async for chunk in engine.generate(request, stream=False):
        ids += chunk.output_ids
        logprobs += chunk.logprobs
        versions += chunk.versions
        if chunk.stop_reason is not None:
            return ModelResponse(
                list(request.input_ids),
                ids,
                logprobs,
                versions,
                chunk.stop_reason,
                chunk.matched_stop,
            )
    raise AssertionError("an engine's last chunk must have a stop reason")
