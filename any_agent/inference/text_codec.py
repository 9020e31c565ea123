"""The conversion between a model's prompts, tokens and texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from any_agent.chat import ChatFormat, chat_format_for, load_hf_tokenizer
from any_agent.chat.output.detokenizer import decode_ids
from any_agent.config import ModelConfig
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.types import GenerationChunk, GenerationHyperparameters, Message, ModelRequest


@dataclass(frozen=True, slots=True)
class TextChunk(GenerationChunk):
    """New tokens, and the text that they complete."""

    text: str = ""


class TextCodec:
    """A tokenizer and its chat format; ``missing`` is the error about the one that is missing."""

    def __init__(
        self,
        tokenizer: Any = None,
        chat: ChatFormat | None = None,
        missing: AnyAgentError | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._chat = chat
        self._missing = missing or ConfigError("the engine is not open: call initialize() first")
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    @property
    def chat(self) -> ChatFormat:
        """The chat format; ConfigError for a model without a usable chat template."""
        if self._chat is None:
            raise self._missing
        return self._chat

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens spelled out."""
        return decode_ids(self.tokenizer, ids)

    def reader(self, stop: tuple[str, ...]) -> Callable[[GenerationChunk], str]:
        """Return a function that returns, for each chunk of one output, the text it completes.

        Special tokens have no text, and the text ends before the stop string. Without a chat
        format the last chunk has all of the text.
        """
        if self._chat is None:
            return self._final_reader(stop)
        parser = self.chat.text_parser(stop)

        def read(chunk: GenerationChunk) -> str:
            deltas = parser.feed([i for i in _without_stop(chunk) if i not in self._special])
            if chunk.stop_reason is not None:
                deltas += parser.finish()[0]
            return "".join(delta.content or "" for delta in deltas)

        return read

    def _final_reader(self, stop: tuple[str, ...]) -> Callable[[GenerationChunk], str]:
        seen: list[int] = []

        def read(chunk: GenerationChunk) -> str:
            seen.extend(_without_stop(chunk))
            if chunk.stop_reason is None:
                return ""
            text = self.decode([i for i in seen if i not in self._special])
            return min((text.partition(one)[0] for one in stop), key=len, default=text)

        return read


def _without_stop(chunk: GenerationChunk) -> list[int]:
    """Return the chunk's ids without the token that stopped the output."""
    ids, stop = chunk.output_ids, chunk.matched_stop
    return ids[:-1] if isinstance(stop, int) and ids[-1:] == [stop] else ids


def words_of(tokenizer: Any, path: Path | None, model: ModelConfig) -> TextCodec:
    """Return the codec of a tokenizer, else of the model in ``path``; ConfigError without both."""
    given = tokenizer if tokenizer is not None else path and str(path)
    if given is None:
        raise ConfigError("the engine does not report its model's folder: give tokenizer=")
    try:
        chat = chat_format_for(
            given,
            renderer=model.renderer,
            enable_thinking=model.enable_thinking,
            thinking_retention=model.thinking_retention,
        )
        return TextCodec(chat.tokenizer, chat)
    except ConfigError as error:
        # Without a chat template the engine still answers token ids.
        if isinstance(given, str | Path):
            try:
                given = load_hf_tokenizer(str(given))
            except ConfigError:
                raise ConfigError(f"{error.message}; give tokenizer=") from None
        return TextCodec(given, None, error)


def asked_for(
    request: ModelRequest | None,
    prompt: list[Message] | str | None,
    messages: list[Message] | None,
    input_ids: Any,
    sampling: dict[str, Any],
) -> ModelRequest:
    """Return the request of these arguments; ValueError unless exactly one is the prompt."""
    given = [value is not None for value in (request, prompt, messages, input_ids)]
    if sum(given) != 1:
        raise ValueError("give one of a request, prompt=, messages= and input_ids=")
    if request is not None:
        if sampling:
            raise ValueError(f"{', '.join(sampling)}: give it in the request's gconfig")
        return request
    if "stream" in sampling:
        raise TypeError("stream: iterate over agenerate_stream(...) with the same arguments")
    if "max_tokens" in sampling:
        if "max_new_tokens" in sampling:
            raise ValueError("max_tokens and max_new_tokens are the same: give one of them")
        sampling = sampling | {"max_new_tokens": sampling["max_tokens"]}
        del sampling["max_tokens"]
    gconfig = GenerationHyperparameters().new(**sampling)
    if input_ids is not None:
        return ModelRequest(input_ids=input_ids, gconfig=gconfig)
    return ModelRequest(prompt=messages if prompt is None else prompt, gconfig=gconfig)
