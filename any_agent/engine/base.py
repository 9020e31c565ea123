"""The interface of an inference engine, limited to the needs of the service."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from any_agent.errors import InvalidRequest
from any_agent.types import GenerationChunk, ModelRequest, ModelResponse

T = TypeVar("T")

HALF_LOADED = -1  # the version of weights that belong to no version; nothing is sampled with them


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features of an engine beside plain sampling with log-probabilities."""

    top_logprobs: bool = True
    penalties: bool = True
    """Frequency, presence and repetition penalties."""
    min_p: bool = True
    logit_bias: bool = True
    grammar: bool = True
    """JSON schemas and regular expressions."""
    structural_tag: bool = True
    """Grammars by which an answer has a given form or calls tools."""
    seed: bool = True
    """A seed decides the draws; an engine that cannot do this ignores the seed."""
    bound_tokens: bool = False
    """Each token under a grammar comes with whether the grammar decided it
    (:attr:`~any_agent.types.GenerationChunk.bound`)."""

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]


class InferenceEngine(Protocol):
    """Token ids in; token ids with log-probabilities and weight versions out."""

    @property
    def version(self) -> int:
        """The weight version that newly started tokens are sampled with."""

    def generate(self, request: ModelRequest, *, stream: bool) -> AsyncGenerator[GenerationChunk]:
        """Sample a completion; only the last chunk has a stop reason.

        With ``stream`` a chunk comes as soon as its tokens exist. Closing the iterator cancels
        the request in the engine. A weight update in between, or a restart of the engine, is not
        visible here, except in the tokens' versions.

        Raises EngineUnavailable (an update or a restart took too long), EngineMismatch (the
        engine's answer cannot belong to this request), InvalidRequest.
        """

    async def capabilities(self) -> Capabilities:
        """Return what requests may ask for; EngineUnavailable if the engine does not answer."""

    async def pause(self) -> None:
        """Stop sampling; running requests are kept and wait."""

    async def resume(self, version: int) -> None:
        """Continue with the weights of ``version``."""


class ScriptInferenceEngine(Protocol):
    """An engine of a script, which runs on an event loop of its own."""

    @property
    def inference_engine(self) -> InferenceEngine:
        """The same engine, for callers on any event loop."""


class RolloutEngine(InferenceEngine, Protocol):
    """The engine that workflows get: one engine, or several as one, that returns completions."""

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Return the completion of one request.

        Successive requests of one ``rid`` go to the same engine, which has the beginning of their
        prompts in its cache. Raises as :meth:`InferenceEngine.generate`.
        """


class RemoteEngine:
    """The client of one engine process, reached by URL; a rank's proxy drives its engine by it.

    :func:`any_agent.engine.open_engine` makes one. The methods with a default describe an
    engine that never dies and whose weights never change. Open it inside a running event loop;
    ``close`` it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.resubmitted: Counter[str] = Counter()
        """Calls sent again with the tokens they had, by reason: `update` or `death`."""
        self.silence = 0.0
        """Seconds for which the engine has left every question of :meth:`watch` unanswered."""

    @property
    def version(self) -> int:
        """The weight version the engine reported last, also after a restart with other weights;
        HALF_LOADED while it reports no number."""
        raise NotImplementedError

    @property
    def paused(self) -> bool:
        """Calls wait for a weight update."""
        return False

    @property
    def away(self) -> bool:
        """The engine died or hangs, and has not answered since."""
        return False

    def generate(self, request: ModelRequest, *, stream: bool) -> AsyncGenerator[GenerationChunk]:
        """Sample a completion as :meth:`InferenceEngine.generate`."""
        raise NotImplementedError

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Return the completion of one request; raises as :meth:`generate`."""
        return await agenerate(self, request)

    async def info(self) -> dict[str, Any]:
        """Ask which model and weight version the engine serves; EngineUnavailable if it does not
        answer. `model_path` and `weight_version` are read where they are present."""
        raise NotImplementedError

    async def context_length(self) -> int:
        """Return how many tokens of prompt and output together the engine takes; ConfigError if
        it does not report that."""
        raise NotImplementedError

    async def slots(self) -> int | None:
        """Return how many requests the engine samples at once; None if that is unknown."""
        return None

    async def capabilities(self) -> Capabilities:
        """Return what requests may ask for; EngineUnavailable if the engine does not answer."""
        return Capabilities(**dict.fromkeys(Capabilities.names(), False))

    async def require_model(self) -> None:
        """Raise ConfigError if the engine serves a model of another shape than the run's."""

    async def pause(self) -> None:
        """Stop sampling for a weight update; calls under way are kept and wait."""

    async def resume(self, version: int) -> None:
        """Continue with the weights of ``version``."""

    async def hold(self) -> None:
        """Make calls wait here, while another process pauses the engine for an update."""

    def release(self, version: int | None = None) -> None:
        """Let calls continue under ``version``; None: under the version the engine reports."""

    async def watch(self, *, hung_after: float) -> None:
        """Ask the engine whether it lives, until cancelled; it is `away` while it does not answer.

        After ``hung_after`` silent seconds its running calls are cut off as by its death.
        """

    async def close(self) -> None:
        """Close the connections; calls that still run end as EngineUnavailable."""


async def agenerate(engine: InferenceEngine, request: ModelRequest) -> ModelResponse:
    """Return the completion of one request.

    InvalidRequest if the prompt is not token ids, and for an adapter: a row of the response would
    be trained on as the model's own.
    """
    request.require_ids()
    if request.adapter is not None:
        raise InvalidRequest(
            f"agenerate samples the model alone, and the request names the adapter "
            f"{request.adapter[:80]!a}: leave it out, or read the chunks of generate, which tell "
            "what sampled",
            param="adapter",
        )
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


async def adapter_names(engine: Any) -> frozenset[str]:
    """Return the names by which requests may ask an engine for an adapter; none if it tells
    none."""
    ask = getattr(engine, "adapter_names", None)
    return frozenset() if ask is None else frozenset(await ask())


class RunOnLoop(Protocol):
    """Runs work with an engine on the engine's own event loop; it is cancelled with its caller."""

    def __call__(self, work: Callable[[Any], Coroutine[Any, Any, T]], /) -> Awaitable[T]: ...


class CrossLoopEngine:
    """An engine that runs on one event loop, for callers on any."""

    def __init__(self, run: RunOnLoop, version: Callable[[], int]) -> None:
        self._run = run
        self._version = version

    @property
    def version(self) -> int:
        return self._version()

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        return await self._run(lambda engine: engine.agenerate(request))

    async def adapter_names(self) -> frozenset[str]:
        async def ask(engine: Any) -> frozenset[str]:
            return await adapter_names(engine)

        return await self._run(ask)

    async def generate(
        self, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[GenerationChunk]:
        home = asyncio.get_running_loop()
        news: asyncio.Queue[GenerationChunk | None] = asyncio.Queue()

        async def pump(engine: InferenceEngine) -> None:
            async with aclosing(engine.generate(request, stream=stream)) as chunks:
                async for chunk in chunks:
                    home.call_soon_threadsafe(news.put_nowait, chunk)

        work = asyncio.ensure_future(self._run(pump))
        work.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while (chunk := await news.get()) is not None:
                yield chunk
            await work
        finally:
            work.cancel()

    async def capabilities(self) -> Capabilities:
        return await self._run(lambda engine: engine.capabilities())

    async def pause(self) -> None:
        await self._run(lambda engine: engine.pause())

    async def resume(self, version: int) -> None:
        await self._run(lambda engine: engine.resume(version))
