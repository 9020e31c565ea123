"""An engine object for scripts: a trained model or running engines, usable from every thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import fields, replace
from functools import update_wrapper
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from any_agent.chat import ChatFormat
from any_agent.config import ENGINE_KEY_VARIABLE, Config, RolloutConfig
from any_agent.config.script import sampling_of
from any_agent.engine import EnginePool, InferenceEngine
from any_agent.engine.base import CrossLoopEngine
from any_agent.engine.model_fingerprint import shape_of
from any_agent.errors import ContextLengthExceeded, EngineUnavailable
from any_agent.inference.engine_process import chosen, own_engine
from any_agent.inference.text_codec import TextChunk, TextCodec, asked_for, words_of
from any_agent.inference.weights_source import WeightsSource, find_weights_source, require_weights
from any_agent.rollout import WorkflowExecutor
from any_agent.runtime.command_line import one_line_errors
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


class ScriptEngine(CrossLoopEngine):
    """A script's engine as an `any_agent.engine.InferenceEngine`, for callers on any event loop."""

    def __init__(self, engine: RemoteSGLangEngine) -> None:
        super().__init__(engine.ask, lambda: engine.version)
        self._engine = engine

    async def context_length(self) -> int:
        return self._engine.context_length


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
    """A model that answers prompts and runs workflows after :meth:`initialize`.

    It may be called from any thread and event loop, concurrently. ``config`` configures workflows;
    a complete configuration, as a training script has it, also sets their sampling, and the model
    or engines if :meth:`initialize` gets none. Close it, or use ``with`` or ``async with``.
    """

    def __init__(self, config: Config | RolloutConfig | None = None) -> None:
        one_line_errors(place=True)
        self._given = config if isinstance(config, Config) else None
        own = {"rollout": config} if isinstance(config, RolloutConfig) else {}
        self._settings = self._given or Config().model_copy(update=own)
        self._stack: ExitStack | None = None
        self._lock = threading.Lock()
        """Held while a call starts, and while the engine closes, so that each call gets its end."""
        self._executor: WorkflowExecutor | None = None
        self._pool: EnginePool | None = None
        self._words = TextCodec()
        self.path: Path | None = None
        """The folder of the weights; None if a running engine does not report it."""
        self.context_length = 0
        """The most tokens of prompt and output together."""

    # -- start and end -------------------------------------------------------------------------

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
        key: str | None = None,
    ) -> Self:
        """Load a trial's latest checkpoint, or that of a ``step`` or a ``version``; return self.

        ``root`` is by default ``ANY_AGENT_ROOT``, else `runs`. ``model`` is a folder or a hub name
        instead of a trial. The trial's ``engine`` settings decide how it is served: by the embedded
        engine, in this process, or by an SGLang (``kind="sglang"``, from the environment of the
        interpreter ``python``) that is started and ended with this object. With ``url``, or several
        ``urls``, nothing is started: these engines must have the vocabulary and, as far as they
        report them, the weights of the named model; without a name any engine is accepted. They get
        ``key``, by default `engine.key`, else ``ANY_AGENT_ENGINE__KEY``.
        ``tokenizer`` is one of transformers or the path of one; default: the model's. Blocks until
        everything is loaded.

        Raises NotFound, which lists the existing trials, steps and versions; ConfigError,
        StartupError, EngineUnavailable; ValueError for contradictory arguments.
        """
        if self._executor is not None:
            raise RuntimeError("the engine is initialized already: close() it, or make another one")
        there = [*([url] if url else []), *urls]
        if not (there or experiment_name or trial_name or model) and self._given is not None:
            there, own = list(self._given.engine.urls), self._given.model.path or None
            if there:  # Their weights are those of the training, and change.
                tokenizer = own if tokenizer is None else tokenizer
            else:
                model = own
        kept = find_weights_source(
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
            key = key or self._settings.engine.secret_key or os.environ.get(ENGINE_KEY_VARIABLE)
            if kept is not None and not there:
                wanted = chosen(kept, kind, python, device)
                engine, key = own_engine(wanted, kind or python, stack)
                engines = [engine]
            self._open(engines, key, kept, tokenizer, stack)
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        """End workflows and started engines; running calls end as EngineUnavailable."""
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
        key: str | None,
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
            key=key,
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
            seed=settings.train.seed,
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

    # -- properties ----------------------------------------------------------------------------

    @property
    def executor(self) -> WorkflowExecutor:
        """The executor of workflows; EngineUnavailable unless the engine is open."""
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
        """The format of the model's messages; ConfigError for a model without one."""
        return self._words.chat

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, of transformers."""
        return self._words.tokenizer

    @property
    def inference_engine(self) -> ScriptEngine:
        """This engine for recording clients, such as `EngineOpenAI`, on any event loop."""
        return ScriptEngine(self)

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
        """Return the completion of a request, or of a ``prompt``, ``messages`` or ``input_ids``.

        A prompt that is one text becomes a message of the user. ``sampling`` are fields of
        :class:`GenerationHyperparameters`; ``max_tokens`` is its ``max_new_tokens``. The context
        limits the length of an answer. Raises InvalidRequest, ContextLengthExceeded,
        EngineUnavailable; TypeError and ValueError for contradictory arguments.
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
        """Yield the completion as it is sampled; the texts of all chunks make up the response's.

        Closing the iterator ends the request. Arguments and errors are those of :meth:`agenerate`.
        """
        asked = asked_for(request, prompt, messages, input_ids, sampling)
        reader = self._words.reader(asked.gconfig.stop)
        async with aclosing(self.inference_engine.generate(asked, stream=True)) as chunks:
            async for chunk in chunks:
                same = {field.name: getattr(chunk, field.name) for field in fields(GenerationChunk)}
                yield TextChunk(**same, text=reader(chunk))

    def generate(self, input_ids: Any, gconfig: GenerationHyperparameters) -> ModelResponse:
        """Return the completion of token ids; it blocks, for use without an event loop."""
        request = ModelRequest(input_ids=input_ids, gconfig=gconfig)
        return self._call(lambda pool: pool.agenerate(request))

    def chat(
        self, messages: list[Message], *, tools: list[Tool] | None = None, **sampling: Any
    ) -> Message:
        """Return the assistant's message, with reasoning and tool calls parsed; it blocks.

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
        """Return a request with its prompt as token ids, and an answer that fits the context."""
        g, ids = request.gconfig, request.input_ids
        if request.prompt is not None:
            prompt = request.prompt
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = self.chat_format.render(messages, None)
            g = g.new(stop_token_ids=g.stop_token_ids + self.chat_format.stop_token_ids)
        room = self.context_length - len(ids)
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {len(ids)} tokens, the context {self.context_length}: shorten the "
                "prompt, as there is no room for an answer"
            )
        if g.max_new_tokens > room:
            g = g.new(max_new_tokens=room)
        tokenizer = request.tokenizer if request.tokenizer is not None else self.tokenizer
        return replace(request, input_ids=ids, prompt=None, gconfig=g, tokenizer=tokenizer)

    async def ask(self, ask: Callable[[EnginePool], Coroutine[Any, Any, T]]) -> T:
        """Return the result of ``ask``, on any event loop."""
        try:
            return await asyncio.wrap_future(self._begun(ask))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _closed() from None

    def _call(self, ask: Callable[[EnginePool], Coroutine[Any, Any, T]]) -> T:
        """Wait in this thread for the result of ``ask``."""
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
"""Another name of RemoteSGLangEngine, for scripts that use its blocking methods."""


def load_engine(
    experiment: str,
    trial: str,
    *,
    user: str | None = None,
    root: str | Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "cpu",
) -> RemoteSGLangEngine:
    """Load the latest checkpoint of a trial into this process; close it, or use ``with``.

    Raises as :meth:`RemoteSGLangEngine.initialize`.
    """
    engine = RemoteSGLangEngine()
    return engine.initialize(
        experiment, trial, user=user, root=root, kind="embedded", device=device
    )


def _closed() -> EngineUnavailable:
    return EngineUnavailable("the engine was closed before it answered")
