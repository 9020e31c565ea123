"""A model's words: how its prompts are written, and its tokens read as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from any_agent.chat import ChatFormat, chat_format_for, load_hf_tokenizer
from any_agent.config import ModelConfig
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.types import GenerationChunk, GenerationHyperparameters, Message, ModelRequest


@dataclass(frozen=True, slots=True)
class TextChunk(GenerationChunk):
    """Freshly sampled tokens, and the text that became certain by them."""

    text: str = ""


class TextCodec:
    """A tokenizer, and the chat format on it; ``missing`` is why one of them is not there."""

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
        """ConfigError for a model without a chat template that can be used."""
        if self._chat is None:
            raise self._missing
        return self._chat

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens spelled out."""
        return str(
            self.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def reader(self, stop: tuple[str, ...]) -> Callable[[GenerationChunk], str]:
        """Return what gives, for each chunk of one output, the text that it makes certain.

        Special tokens give none, and the text ends before what stopped it. Without a chat format
        all of it comes at the end.
        """
        if self._chat is None:
            return self._at_the_end(stop)
        parser = self.chat.text_parser(stop)

        def read(chunk: GenerationChunk) -> str:
            deltas = parser.feed([i for i in _told(chunk) if i not in self._special])
            if chunk.stop_reason is not None:
                deltas += parser.finish()[0]
            return "".join(delta.content or "" for delta in deltas)

        return read

    def _at_the_end(self, stop: tuple[str, ...]) -> Callable[[GenerationChunk], str]:
        seen: list[int] = []

        def read(chunk: GenerationChunk) -> str:
            seen.extend(_told(chunk))
            if chunk.stop_reason is None:
                return ""
            text = self.decode([i for i in seen if i not in self._special])
            return min((text.partition(one)[0] for one in stop), key=len, default=text)

        return read


def _told(chunk: GenerationChunk) -> list[int]:
    """The chunk's ids without the token that stopped the output."""
    ids, stop = chunk.output_ids, chunk.matched_stop
    return ids[:-1] if isinstance(stop, int) and ids[-1:] == [stop] else ids


def words_of(tokenizer: Any, path: Path | None, model: ModelConfig) -> TextCodec:
    """Return the words of a tokenizer, else of the model in ``path``; ConfigError without both."""
    given = tokenizer if tokenizer is not None else path and str(path)
    if given is None:
        raise ConfigError("the engine does not say where its model lies: give tokenizer=")
    try:
        chat = chat_format_for(
            given,
            renderer=model.renderer,
            enable_thinking=model.enable_thinking,
            thinking_retention=model.thinking_retention,
        )
        return TextCodec(chat.tokenizer, chat)
    except ConfigError as error:
        # Without a chat template token ids can be asked all the same.
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
    """The request that these arguments make; ValueError unless exactly one says what is asked."""
    given = [value is not None for value in (request, prompt, messages, input_ids)]
    if sum(given) != 1:
        raise ValueError("give one of a request, prompt=, messages= and input_ids=")
    if request is not None:
        if sampling:
            raise ValueError(f"{', '.join(sampling)}: give it in the request's gconfig")
        return request
    if "stream" in sampling:
        raise TypeError("stream: iterate over agenerate_stream(...), which is asked the same")
    if "max_tokens" in sampling:
        if "max_new_tokens" in sampling:
            raise ValueError("max_tokens and max_new_tokens are the same: give one of them")
        sampling = sampling | {"max_new_tokens": sampling["max_tokens"]}
        del sampling["max_tokens"]
    gconfig = GenerationHyperparameters().new(**sampling)
    if input_ids is not None:
        return ModelRequest(input_ids=input_ids, gconfig=gconfig)
    return ModelRequest(prompt=messages if prompt is None else prompt, gconfig=gconfig)
