"""A trained model in this process: by experiment and trial, without a service."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from any_agent.chat import ChatFormat, load_chat_format
from any_agent.config import LOOPBACK, Config, load_config
from any_agent.engine import agenerate
from any_agent.errors import ContextLengthExceeded, NotFound
from any_agent.rundir import RunDir
from any_agent.types import GenerationHyperparameters, Message, ModelRequest, ModelResponse, Tool

T = TypeVar("T")


def load_engine(
    experiment: str,
    trial: str,
    *,
    user: str | None = None,
    root: str | Path = "runs",
    device: str = "cpu",
) -> LocalModel:
    """The latest checkpoint of a trial, ready to answer; close it, or use ``with``.

    Raises NotFound when the trial has no checkpoint under ``root``, ConfigError when its folder was
    written by a version of another layout.
    """
    run = RunDir.of(Path(root), user or Config().user, experiment, trial)
    try:
        name = (run.checkpoints / "latest").read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise NotFound(
            f"{experiment}/{trial} has no checkpoint in {run.checkpoints}; "
            "is `root` the folder that it was trained under?"
        ) from None
    run.check_format()
    # It may have served others, for which the admin key is missing here.
    config = load_config(run.path / "config.yaml", [f"server.host={LOOPBACK[0]}"], environ={})
    chat = load_chat_format(
        str(run.checkpoints / name),
        renderer=config.model.renderer,
        enable_thinking=config.model.enable_thinking,
        thinking_retention=config.model.thinking_retention,
    )
    return LocalModel(run.checkpoints / name, chat, device=device)


class LocalModel:
    """A model and its chat format, on an event loop of its own thread."""

    def __init__(self, path: Path, chat: ChatFormat, *, device: str = "cpu") -> None:
        from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions

        self.path = path
        self.chat_format = chat
        self._engine = EmbeddedEngine.load(str(path), EngineOptions(device=device))
        self.context_length: int = self._engine.loaded.context_length
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="model", daemon=True)
        self._thread.start()
        self._call(self._engine.start())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._engine.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    def chat(
        self, messages: list[Message], *, tools: list[Tool] | None = None, **sampling: Any
    ) -> Message:
        """The assistant's message.

        ``sampling`` are fields of :class:`GenerationHyperparameters`. Raises InvalidRequest.
        """
        prompt = self.chat_format.render(messages, tools)
        room = self.context_length - len(prompt)
        if room < 1:
            raise ContextLengthExceeded(
                f"the messages are {len(prompt)} tokens long, the context {self.context_length}"
            )
        wanted = GenerationHyperparameters(**sampling)
        response = self.generate(
            prompt,
            wanted.new(
                max_new_tokens=min(wanted.max_new_tokens, room),
                stop_token_ids=wanted.stop_token_ids + self.chat_format.stop_token_ids,
            ),
        )
        parser = self.chat_format.stream_parser(prompt_ids=prompt, tools=tools, stop=wanted.stop)
        parser.feed(response.output_ids)
        return parser.finish(matched_stop=None)[1].to_message()

    def generate(self, input_ids: list[int], gconfig: GenerationHyperparameters) -> ModelResponse:
        """Token ids in, token ids out."""
        request = ModelRequest(uuid.uuid4().hex, input_ids, gconfig)
        return self._call(agenerate(self._engine, request))

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result()
