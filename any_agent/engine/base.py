"""What the service asks of an inference engine, and nothing more."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, fields
from typing import Protocol

from any_agent.types import GenerationChunk, ModelRequest, ModelResponse


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do beside plain sampling with log-probabilities."""

    top_logprobs: bool = True
    penalties: bool = True
    """Frequency, presence and repetition."""
    min_p: bool = True
    logit_bias: bool = True
    grammar: bool = True
    """JSON schemas and regular expressions."""
    structural_tag: bool = True
    """Grammars by which an answer has a given form or calls tools."""
    seed: bool = True
    """Whether a seed decides the draws; an engine that cannot ignores it."""

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]


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

        Raises EngineUnavailable (an update or a restart took too long), EngineMismatch (its
        answer cannot be one to this request), InvalidRequest.
        """
        ...

    async def capabilities(self) -> Capabilities:
        """What requests may ask for; EngineUnavailable if the engine cannot be asked."""
        ...

    async def pause(self) -> None:
        """Stop sampling; requests under way are kept and wait."""
        ...

    async def resume(self, version: int) -> None:
        """Go on with the weights of ``version``."""
        ...


class ScriptInferenceEngine(Protocol):
    """An engine of a script, which runs on an event loop of its own."""

    @property
    def inference_engine(self) -> InferenceEngine:
        """The same engine, for callers on any event loop."""
        ...


class RolloutEngine(InferenceEngine, Protocol):
    """What workflows are given: an engine, or several as one, whose completions come whole."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """The whole completion of one request.

        Requests of one ``rid``, one after the other, go to the same engine, where the beginning
        of their prompts is in the cache. Raises as :meth:`InferenceEngine.generate`.
        """
        ...


async def agenerate(engine: InferenceEngine, request: ModelRequest) -> ModelResponse:
    """The whole completion of one request; InvalidRequest for a prompt that is no token ids."""
    request.require_ids()
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    async for chunk in engine.generate(request, stream=False):
        ids += chunk.output_ids
        logprobs += chunk.logprobs
        versions += chunk.versions
        if chunk.stop_reason is not None:
            return ModelResponse(
                [int(i) for i in request.input_ids],
                ids,
                logprobs,
                versions,
                chunk.stop_reason,
                chunk.matched_stop,
                request.tokenizer,
            )
    raise AssertionError("an engine's last chunk must have a stop reason")
