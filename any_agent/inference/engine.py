"""One engine object for a script: a trained model, or engines that run, asked from anywhere."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import update_wrapper
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from any_agent.chat import ChatFormat
from any_agent.config import Config, RolloutConfig
from any_agent.config.script import sampling_of
from any_agent.engine import Capabilities, EnginePool, InferenceEngine
from any_agent.engine.model_fingerprint import shape_of
from any_agent.errors import ContextLengthExceeded, EngineUnavailable
from any_agent.inference.engine_process import chosen, own_engine
from any_agent.inference.text_codec import TextChunk, TextCodec, asked_for, words_of
from any_agent.inference.weights_source import WeightsSource, named, require_weights
from any_agent.rollout import WorkflowExecutor
from any_agent.runtime.private_address import require_private_url
from any_agent.types import (
    GenerationChunk,
    GenerationHyperparameters,
    Message,
    ModelRequest,
    ModelResponse,
    Tool,
)
from any_agent.workflow.dump import TrajectoryDump


class CrossLoopEngine:
    """Token ids in, chunks of token ids out, as recording clients take them."""

    def __init__(self, engine: RemoteSGLangEngine) -> None:
        self._engine = engine

    @property
    def version(self) -> int:
        return self._engine.version

    def generate(self, request: ModelRequest, *, stream: bool) -> AsyncGenerator[GenerationChunk]:
        return self._engine.agenerate_stream(request)

    async def capabilities(self) -> Capabilities:
        return await self._engine.ask(lambda pool: pool.capabilities())

    async def context_length(self) -> int:
        return self._engine.context_length

    async def pause(self) -> None:
        await self._engine.ask(lambda pool: pool.pause())

    async def resume(self, version: int) -> None:
        await self._engine.ask(lambda pool: pool.resume(version))


P = ParamSpec("P")
T = TypeVar("T")


def _of_executor(
    method: Callable[Concatenate[WorkflowExecutor, P], T],
) -> Callable[Concatenate[RemoteSGLangEngine, P], T]:
    def call(self: RemoteSGLangEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self.executor, *args, **kwargs)

    update_wrapper(call, method)
    return call


class RemoteSGLangEngine:
    """A model that answers prompts and runs workflows, once it is told which: :meth:`initialize`.

    It may be asked from any thread and any event loop, by many at once. ``config`` says how
    workflows run; a whole configuration, as a training script has it, also how they sample, and
    which model or engines are meant where :meth:`initialize` is not told. Close it, or use ``with``
    or ``async with``.
    """

    def __init__(self, config: Config | RolloutConfig | None = None) -> None:
        self._given = config if isinstance(config, Config) else None
        own = {"rollout": config} if isinstance(config, RolloutConfig) else {}
        self._settings = self._given or Config().model_copy(update=own)
        self._stack: ExitStack | None = None
        self._lock = threading.Lock()
        """Held to begin a call, and to end all: what begins before the end is told of it."""
        self._executor: WorkflowExecutor | None = None
        self._pool: EnginePool | None = None
        self._words = TextCodec()
        self.path: Path | None = None
        """The weights' folder; None if a joined engine does not name it."""
        self.context_length = 0
        """Tokens of prompt and output together."""

    # -- its life ------------------------------------------------------------------------------

    def initialize(
        self,
        experiment_name: str | None = None,
        trial_name: str | None = None,
        *,
        user: str | None = None,
        root: str | Path | None = None,
        step: int | None = None,
        version: int | None = None,
        model: str | Path | None = None,
        url: str | None = None,
        urls: Sequence[str] = (),
        tokenizer: Any = None,
        kind: Literal["embedded", "sglang"] | None = None,
        python: str | None = None,
        device: Literal["auto", "cpu", "cuda"] | None = None,
    ) -> Self:
        """Load a trial's latest checkpoint, or that of a ``step`` or a ``version``, and be ready.

        ``root`` is by default ``ANY_AGENT_ROOT``, else `runs`. ``model`` is a folder or a hub name
        instead of a trial. It is served as the trial's ``engine`` settings say: by the embedded
        engine, in this process, or by an SGLang that is started (``kind="sglang"``, from the
        environment of the interpreter ``python``) and ended with this. With ``url``, or several
        ``urls``, nothing is started: these engines are asked, which must have the vocabulary and,
        as far as they say, the weights of what is named; without names they are taken as they are.
        ``tokenizer`` is one of transformers or the path of one; default: the model's. Blocks until
        all of it is loaded, and returns itself.

        Raises NotFound, which says which trials, steps and versions there are; ConfigError,
        StartupError, EngineUnavailable; ValueError for what contradicts itself.
        """
        if self._executor is not None:
            raise RuntimeError("it is initialized already: close() it first, or make another one")
        there = [*([url] if url else []), *urls]
        if not (there or experiment_name or trial_name or model) and self._given is not None:
            there, own = list(self._given.engine.urls), self._given.model.path or None
            if there:  # whose weights are the training's, and change
                tokenizer = own if tokenizer is None else tokenizer
            else:
                model = own
        kept = named(
            experiment_name,
            trial_name,
            user=user,
            root=root,
            step=step,
            version=version,
            model=model,
            settings=self._settings,
        )
        if kept is None and not there:
            raise ValueError(
                "nothing is named: give experiment_name and trial_name, model=, or url="
            )
        with ExitStack() as stack:
            for one in there:
                require_private_url(one)
            engines: list[str | InferenceEngine] = [*there]
            if kept is not None and not there:
                engines = [own_engine(chosen(kept, kind, python, device), kind or python, stack)]
            self._open(engines, kept, tokenizer, stack)
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """End what runs and what was started; calls under way end as EngineUnavailable."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    destroy = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def _open(
        self,
        engines: Sequence[str | InferenceEngine],
        kept: WeightsSource | None,
        tokenizer: Any,
        stack: ExitStack,
    ) -> None:
        settings = self._settings
        shape = shape_of(str(kept.weights.path)) if kept is not None else None
        pool = EnginePool(
            engines,
            decode=lambda ids: self._words.decode(ids),
            write=self._write,
            shape=shape,
            update_mode=settings.engine.update_mode,
            update_wait=settings.engine.update_wait,
            request_timeout=settings.engine.request_timeout,
        )
        whole = self._given is not None
        executor = WorkflowExecutor(
            pool,
            settings.rollout,
            sampling=sampling_of(settings) if whole else None,
            eval_sampling=sampling_of(settings, settings.eval.temperature) if whole else None,
            dump=TrajectoryDump.of(settings, lambda ids: self._words.decode(ids)),
            timeout=settings.sessions.ttl,
            discount=settings.train.discount,
            vocab_size=shape.vocab_size if shape is not None else None,
        )
        stack.enter_context(executor)
        stack.callback(self._forget)
        self._pool, self._executor = pool, executor
        where = self._call(lambda pool: require_weights(pool, kept))
        self.context_length = self._call(lambda pool: pool.context_length())
        self.path = kept.weights.path if kept is not None else where
        config = kept.config if kept is not None else settings
        self._words = words_of(tokenizer, self.path, config.model)

    def _forget(self) -> None:
        with self._lock:
            self._executor = self._pool = None

    # -- what it is ----------------------------------------------------------------------------

    @property
    def executor(self) -> WorkflowExecutor:
        """The executor of its workflows; EngineUnavailable before :meth:`initialize` and after
        :meth:`close`."""
        if self._executor is None:
            raise EngineUnavailable("the engine is not open: call initialize() first")
        return self._executor

    @property
    def version(self) -> int:
        """The weight version that new tokens are sampled with."""
        return self.executor.version

    def get_version(self) -> int:
        """The same as :attr:`version`."""
        return self.version

    @property
    def chat_format(self) -> ChatFormat:
        """How the model's messages are written and read; ConfigError for a model without one."""
        return self._words.chat

    @property
    def tokenizer(self) -> Any:
        """The model's, of transformers."""
        return self._words.tokenizer

    @property
    def inference_engine(self) -> CrossLoopEngine:
        """The same engine for recording clients, such as `EngineOpenAI`, on any event loop."""
        return CrossLoopEngine(self)

    # -- answers -------------------------------------------------------------------------------

    async def agenerate(
        self,
        request: ModelRequest | None = None,
        *,
        prompt: list[Message] | str | None = None,
        messages: list[Message] | None = None,
        input_ids: Any = None,
        **sampling: Any,
    ) -> ModelResponse:
        """The whole completion of a request, or of a ``prompt``, ``messages`` or ``input_ids``.

        A prompt of one text is asked as one message of the user. ``sampling`` are fields of
        :class:`GenerationHyperparameters`; ``max_tokens`` is its ``max_new_tokens``. An answer is
        as long as the context has room. Raises InvalidRequest, ContextLengthExceeded,
        EngineUnavailable; TypeError and ValueError for what contradicts itself.
        """
        asked = asked_for(request, prompt, messages, input_ids, sampling)
        return await self.ask(lambda pool: pool.agenerate(asked))

    async def agenerate_stream(
        self,
        request: ModelRequest | None = None,
        *,
        prompt: list[Message] | str | None = None,
        messages: list[Message] | None = None,
        input_ids: Any = None,
        **sampling: Any,
    ) -> AsyncGenerator[TextChunk]:
        """The same as it is sampled; the texts of all chunks are the response's.

        Closing the iterator ends the request. Arguments and errors are those of :meth:`agenerate`.
        """
        asked = asked_for(request, prompt, messages, input_ids, sampling)
        home = asyncio.get_running_loop()
        reader = self._words.reader(asked.gconfig.stop)
        news: asyncio.Queue[GenerationChunk | None] = asyncio.Queue()

        async def pump(pool: EnginePool) -> None:
            async with aclosing(pool.generate(asked, stream=True)) as chunks:
                async for chunk in chunks:
                    home.call_soon_threadsafe(news.put_nowait, chunk)

        work = asyncio.create_task(self.ask(pump))
        work.add_done_callback(lambda _: news.put_nowait(None))
        try:
            while (chunk := await news.get()) is not None:
                text = reader(chunk)
                yield TextChunk(
                    chunk.output_ids,
                    chunk.logprobs,
                    chunk.versions,
                    chunk.stop_reason,
                    chunk.matched_stop,
                    chunk.top_logprobs,
                    text,
                )
            await work
        finally:
            work.cancel()

    def generate(self, input_ids: Any, gconfig: GenerationHyperparameters) -> ModelResponse:
        """Token ids in, token ids out; it blocks. For use without an event loop."""
        request = ModelRequest(input_ids=input_ids, gconfig=gconfig)
        return self._call(lambda pool: pool.agenerate(request))

    def chat(
        self, messages: list[Message], *, tools: list[Tool] | None = None, **sampling: Any
    ) -> Message:
        """The assistant's message, reasoning and tool calls read; it blocks.

        ``sampling`` and errors are those of :meth:`agenerate`.
        """
        wanted = asked_for(None, messages, None, None, sampling).gconfig
        chat = self.chat_format
        prompt = chat.render(messages, tools)
        stops = wanted.stop_token_ids + chat.stop_token_ids
        response = self.generate(prompt, wanted.new(stop_token_ids=stops))
        parser = chat.stream_parser(prompt_ids=prompt, tools=tools, stop=wanted.stop)
        parser.feed(response.output_ids)
        return parser.finish()[1].to_message()

    # -- workflows -----------------------------------------------------------------------------

    submit = _of_executor(WorkflowExecutor.submit)
    wait = _of_executor(WorkflowExecutor.wait)
    wait_for_task = _of_executor(WorkflowExecutor.wait_for_task)
    rollout_batch = _of_executor(WorkflowExecutor.rollout_batch)
    prepare_batch = _of_executor(WorkflowExecutor.prepare_batch)
    pause = _of_executor(WorkflowExecutor.pause)
    resume = _of_executor(WorkflowExecutor.resume)

    # ------------------------------------------------------------------------------------------

    def _write(self, request: ModelRequest) -> ModelRequest:
        """The request as it is sent: a prompt as token ids, and no longer than there is room."""
        g, ids = request.gconfig, request.input_ids
        if request.prompt is not None:
            said = request.prompt
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
            ids = self.chat_format.render(messages, None)
            g = g.new(stop_token_ids=g.stop_token_ids + self.chat_format.stop_token_ids)
        room = self.context_length - len(ids)
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt is {len(ids)} tokens long, the context {self.context_length}: nothing "
                "is left for an answer"
            )
        if g.max_new_tokens > room:
            g = g.new(max_new_tokens=room)
        tokenizer = request.tokenizer if request.tokenizer is not None else self.tokenizer
        return replace(request, input_ids=ids, prompt=None, gconfig=g, tokenizer=tokenizer)

    async def ask(self, ask: Callable[[EnginePool], Coroutine[Any, Any, T]]) -> T:
        """Its result, on whichever event loop this is awaited."""
        try:
            return await asyncio.wrap_future(self._begun(ask))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _closed() from None

    def _call(self, ask: Callable[[EnginePool], Coroutine[Any, Any, T]]) -> T:
        """Its result, in a thread that waits for it."""
        running = asyncio._get_running_loop()
        if running is not None and running is self.executor.loop:
            raise RuntimeError("a workflow must not block the others: await agenerate instead")
        future = self._begun(ask)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise _closed() from None
        finally:
            future.cancel()

    def _begun(
        self, ask: Callable[[EnginePool], Coroutine[Any, Any, T]]
    ) -> concurrent.futures.Future[T]:
        with self._lock:
            loop, pool = self.executor.loop, self._pool
            assert pool is not None
            return asyncio.run_coroutine_threadsafe(ask(pool), loop)


LocalModel = RemoteSGLangEngine
"""The same; its blocking methods are :meth:`~RemoteSGLangEngine.chat` and
:meth:`~RemoteSGLangEngine.generate`."""


def load_engine(
    experiment: str,
    trial: str,
    *,
    user: str | None = None,
    root: str | Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
) -> RemoteSGLangEngine:
    """The latest checkpoint of a trial in this process, ready to answer; close it, or use ``with``.

    Raises as :meth:`RemoteSGLangEngine.initialize`.
    """
    engine = RemoteSGLangEngine()
    return engine.initialize(
        experiment, trial, user=user, root=root, kind="embedded", device=device
    )


def _closed() -> EngineUnavailable:
    return EngineUnavailable("the engine was closed before it had answered")
