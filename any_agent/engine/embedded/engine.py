"""The embedded engine without HTTP: it serves one asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from any_agent.engine.base import Capabilities
from any_agent.engine.embedded.adapters import Adapters
from any_agent.engine.embedded.generate_schema import check_request
from any_agent.engine.embedded.grammar import GrammarCompiler
from any_agent.engine.embedded.grammar_check import GrammarChecker
from any_agent.engine.embedded.model_loader import LoadedModel, load_model
from any_agent.engine.embedded.request import EngineRequest, Event, FinishReason
from any_agent.engine.embedded.sampler import LogitsProcessor
from any_agent.engine.embedded.scheduler import Scheduler
from any_agent.engine.embedded.stops import StopMatcher
from any_agent.engine.embedded.variant import PauseMode, Variant
from any_agent.engine.embedded.weight_loading import apply_weights, read_weights
from any_agent.engine.weight_serialization import checksums
from any_agent.errors import Conflict, EngineUnavailable, InvalidRequest
from any_agent.types import GenerationChunk, ModelRequest


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of loading and serving a model."""

    device: str = "cpu"
    dtype: str = "auto"
    context_length: int | None = None
    """The longest context in tokens; None: the model's."""
    weight_version: str = "0"
    max_running_requests: int = 32
    max_queued_requests: int = 1024
    max_total_tokens: int | None = None
    threads: int | None = None
    """Threads of the model on the CPU, set for the whole process; None: PyTorch's setting."""
    seed: int | None = None
    update_timeout: float = 600.0
    """Seconds that a weight update waits for running requests."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Folders of LoRA adapters beside the model, by their names in requests."""
    live_adapters: int = 0
    """The number of adapters that may be put beside the model while it serves, whose weights stay
    as they are then (:mod:`any_agent.engine.embedded.live_adapters`)."""
    max_adapter_rank: int = 64
    """The highest rank of a live adapter."""


class Generation:
    """One submitted request, as the event loop sees it."""

    def __init__(self, request: EngineRequest, engine: EmbeddedEngine) -> None:
        self.request = request
        self._engine = engine
        self._count = 0
        self._finish: FinishReason | None = None
        self._changed = asyncio.Event()

    def push(self, count: int, finish: FinishReason | None) -> None:
        self._count, self._finish = count, finish
        self._changed.set()
        if finish is not None:
            self._engine.forget(self.request.rid)

    async def progress(self) -> tuple[int, FinishReason | None]:
        """Wait for progress; return the number of readable output tokens, and the end if it came.

        An end that was returned before is returned again, at once: nothing comes after it.
        Raises the request's error: EngineUnavailable, or that of its grammar
        (:attr:`~any_agent.engine.embedded.grammar.GrammarState.error`). Cancelling the wait does
        not cancel the request; :meth:`close` does.
        """
        if self._finish is None:
            await self._changed.wait()
        self._changed.clear()
        if self._finish is not None and self._finish.error is not None:
            raise self._finish.error
        return self._count, self._finish

    async def finished(self) -> FinishReason:
        """Wait for the end."""
        while (finish := (await self.progress())[1]) is None:
            pass
        return finish

    def close(self) -> None:
        """Cancel the request if it has not ended."""
        if self._finish is None:
            with contextlib.suppress(EngineUnavailable):
                self._engine.abort(self.request.rid, "the client went away")


class EmbeddedEngine:
    """A model, its generation loop, and the running requests.

    Use it as ``async with EmbeddedEngine.load(path) as engine``. Call all methods on the event loop
    that started it; the model belongs to the engine's thread.
    """

    def __init__(self, loaded: LoadedModel, options: EngineOptions | None = None) -> None:
        self.loaded = loaded
        self.options = options or EngineOptions()
        self.model_path = loaded.path
        self._generations: dict[str, Generation] = {}
        self._home: asyncio.AbstractEventLoop | None = None
        self._grammars = GrammarCompiler(loaded)
        self.checks = GrammarChecker()
        o = self.options
        wanted = bool(o.adapters or o.live_adapters)
        self.beside = Adapters(loaded, o.adapters, live=o.live_adapters > 0) if wanted else None
        self._raw_decode = loaded.decoder(skip_special_tokens=False)
        self.loop = Scheduler(
            loaded.model,
            loaded.new_cache(self.options.max_total_tokens),
            self._deliver,
            max_running=self.options.max_running_requests,
            max_total_tokens=self.options.max_total_tokens,
            version=self.options.weight_version,
            threads=self.options.threads,
            seed=self.options.seed,
            adapters=self.beside,
        )
        self.variant: Variant = self.loop.base

    @classmethod
    def load(cls, path: str, options: EngineOptions | None = None) -> EmbeddedEngine:
        """Load a checkpoint.

        StartupError for a model that cannot be served, ConfigError for an adapter that does not
        fit.
        """
        o = options or EngineOptions()
        loaded = load_model(path, device=o.device, dtype=o.dtype, context_length=o.context_length)
        return cls(loaded, o)

    async def ended(self) -> BaseException | None:
        """Wait until the generation loop has ended; return the error that ended it, if any."""
        await asyncio.to_thread(self.loop.join)
        return self.loop.error

    async def __aenter__(self) -> EmbeddedEngine:
        self._home = asyncio.get_running_loop()
        self.loop.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Abort the running requests and end the thread."""
        await asyncio.to_thread(self.loop.stop)

    @property
    def version(self) -> int:
        """The version of the next token as a number; -1 for any other name."""
        return int(self.variant.version) if self.variant.version.isdecimal() else -1

    @property
    def adapters(self) -> Mapping[str, str]:
        """The fixed adapters by name, each as ``NAME@FINGERPRINT``."""
        return {} if self.beside is None else self.beside.identities

    @property
    def counts(self) -> tuple[int, int]:
        """The current numbers of running and waiting requests."""
        return self.loop.load

    def _adapter_of(self, request: ModelRequest) -> str | None:
        if request.adapter is None:
            return None
        if request.adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none: it was started without --adapter"
            raise InvalidRequest(
                f"there is no adapter {request.adapter[:80]!a}; this engine has {known}",
                param="lora_path",
            )
        return self.adapters[request.adapter]

    async def make_processor(self, request: ModelRequest) -> LogitsProcessor | None:
        """Make the logits processor of a request, if it needs one.

        Raises InvalidRequest for a text that is no grammar, or too costly a one; EngineUnavailable
        if too many grammars are being checked.
        """
        grammar, text = None, request.gconfig.grammar
        if text is not None:
            source = await asyncio.to_thread(self._grammars.source, text)
            await self.checks.require_harmless(source)
            grammar = await asyncio.to_thread(self._grammars.compile, text)
        processor = LogitsProcessor(request.gconfig, grammar)
        return processor if processor.changes_logits else None

    def submit(
        self,
        request: ModelRequest,
        *,
        stream: bool = True,
        processor: LogitsProcessor | None = None,
    ) -> Generation:
        """Queue a request; with ``stream`` every step is reported, else only the end.

        ``processor`` is the result of :meth:`make_processor` for the request. Raises InvalidRequest
        (nothing reached the model) or EngineUnavailable (queue full, loop ended).
        """
        request.require_ids()
        ids = (
            request.input_ids if isinstance(request.input_ids, list) else request.input_ids.tolist()
        )
        config = check_request(request, ids, self.loaded, self.options.max_total_tokens)
        if request.rid in self._generations:
            raise InvalidRequest(f"rid {request.rid!r} is in use by a running request", param="rid")
        if not self.loop.alive:
            raise EngineUnavailable("the generation loop has ended")
        if len(self._generations) >= (
            self.options.max_running_requests + self.options.max_queued_requests
        ):
            raise EngineUnavailable("The request queue is full.", retry_after=1)
        stop_ids = frozenset(config.stop_token_ids)
        inner = EngineRequest(
            rid=request.rid,
            variant=self.variant,
            adapter=self._adapter_of(request),
            input_ids=ids,
            config=config,
            stop_ids=stop_ids if config.ignore_eos else stop_ids | self.loaded.eos_ids,
            matcher=StopMatcher(config.stop, self._raw_decode) if config.stop else None,
            stream=stream,
            processor=processor,
            top=request.top_logprobs,
        )
        inner.sink = generation = Generation(inner, self)
        if config.max_new_tokens == 0:
            generation.push(0, FinishReason("length"))
            return generation
        self.loop.submit(inner)
        self._generations[request.rid] = generation
        return generation

    async def adapter_names(self) -> frozenset[str]:
        return frozenset(self.adapters)

    async def context_length(self) -> int:
        """Return how many tokens, prompt and output, a request may have."""
        return self.loaded.context_length

    async def capabilities(self) -> Capabilities:
        """Return the features that requests may use."""
        available = self._grammars.available
        return Capabilities(grammar=available, structural_tag=available, bound_tokens=available)

    async def generate(
        self, request: ModelRequest, *, stream: bool = True
    ) -> AsyncGenerator[GenerationChunk]:
        """Sample one request; closing the iterator early cancels it.

        Only the last chunk has a stop reason. Weight versions must be numbers here. Raises
        InvalidRequest, or EngineUnavailable if the engine fails.
        """
        generation = self.submit(
            request, stream=stream, processor=await self.make_processor(request)
        )
        sent = 0
        inner = generation.request
        try:
            finish: FinishReason | None = None
            while finish is None:
                count, finish = await generation.progress()
                yield GenerationChunk(
                    output_ids=inner.output_ids[sent:count],
                    logprobs=inner.logprobs[sent:count],
                    versions=[int(v) for v in inner.versions(sent, count)],
                    stop_reason=finish.type if finish else None,
                    matched_stop=finish.matched if finish else None,
                    top_logprobs=inner.likeliest(sent, count) if inner.top else None,
                    bound=inner.bound[sent:count] if inner.has_grammar else None,
                    adapter=inner.adapter,
                )
                sent = count
        finally:
            generation.close()

    def abort(self, rid: str | None, message: str = "aborted") -> Future[None]:
        """End one request, or all (None), within one step; each returns its output so far."""
        return self.loop.abort(self.variant, rid, message)

    def forget(self, rid: str) -> None:
        """Free the id of a request that has ended."""
        self._generations.pop(rid, None)

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Pause, and return when no step runs; ``abort`` ends every request, ``in_place`` none.

        New requests are queued until :meth:`resume`. InvalidRequest for ``in_place`` beside live
        adapters, whose requests share the steps.
        """
        if mode == "in_place" and self.options.live_adapters:
            raise InvalidRequest(
                "an engine with live adapters cannot keep requests over a pause: set "
                "engine.update_mode=resume",
                param="mode",
            )
        await asyncio.wrap_future(self.loop.pause(self.variant, mode))

    async def resume(self, version: int | None = None) -> None:
        """Continue; ``version``, if given, names the weights that were loaded meanwhile."""
        resumed = self.loop.resume(self.variant, None if version is None else str(version))
        await asyncio.wrap_future(resumed)

    async def rename(self, version: str) -> None:
        """Rename the current weights, from the next token on."""

        def rename() -> None:
            self.variant.version = version

        await asyncio.wrap_future(self.loop.call(rename))

    async def clear_cache(self) -> bool:
        """Free the memory of key/value states; False while requests run."""
        return await asyncio.wrap_future(self.loop.clear_cache(self.variant))

    async def checksums(self) -> dict[str, str]:
        """Return the checksum of every weight in use, tied ones under each of their names."""
        state = self.loaded.model.state_dict()
        return await asyncio.to_thread(checksums, list(state.items()))

    async def update_weights(
        self, path: str, version: str | None = None, *, abort_all: bool = False
    ) -> int:
        """Load a checkpoint into the model; return how many requests were kept paused.

        Raises InvalidRequest for a bad checkpoint (the old weights stay complete), Conflict if the
        running requests did not end in time.
        """
        weights = await asyncio.to_thread(read_weights, self.loaded.model, Path(path))
        kept = await self.apply_weights(weights, version, abort_all=abort_all)
        self.model_path = path
        return kept

    async def apply_weights(
        self, weights: Mapping[str, Tensor], version: str | None, *, abort_all: bool = False
    ) -> int:
        """Use weights of the model's own names, types and shapes, which the engine then owns.

        Returns and raises as :meth:`update_weights`; Conflict if live adapters lie on the model.
        """
        if self.options.live_adapters:
            raise Conflict(
                "this engine's model is the base of live adapters, so its weights stay: publish an "
                "adapter (train.lora) to its URL /adapters/NAME, or use another engine"
            )
        return await self._apply(
            lambda: apply_weights(self.loaded.model, weights), version, abort_all=abort_all
        )

    async def _apply(
        self, apply: Callable[[], None], version: str | None, *, abort_all: bool
    ) -> int:
        if abort_all:
            await asyncio.wrap_future(self.abort(None, "aborted by a weight update"))
        done = self.loop.update(self.variant, apply, version)
        applied = asyncio.wrap_future(done)
        try:
            await asyncio.wait({applied}, timeout=self.options.update_timeout)
        except asyncio.CancelledError:
            done.cancel()  # the caller is gone: an abandoned update must not delay new requests
            raise
        if done.cancel():
            raise Conflict(f"running requests did not end in {self.options.update_timeout:g} s")
        return await applied

    def _deliver(self, events: list[Event]) -> None:
        assert self._home is not None
        # A closed event loop has no caller that waits.
        with contextlib.suppress(RuntimeError):
            self._home.call_soon_threadsafe(self._dispatch, events)

    def _dispatch(self, events: list[Event]) -> None:
        for request, count, finish in events:
            generation: Any = request.sink
            generation.push(count, finish)
