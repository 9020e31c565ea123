"""A call of an inference engine: request, sampling parameters, chunks and response."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from any_agent.errors import ConfigError, InvalidRequest

IdArray: TypeAlias = npt.NDArray[np.int32]
"""Token ids or weight versions, int32, shape [length]."""
Message: TypeAlias = dict[str, Any]
"""One chat message in OpenAI's form: role, content, tool_calls, tool_call_id, reasoning_content."""

StopReason: TypeAlias = Literal["stop", "length", "abort"]


def token_ids(given: Any) -> list[int] | IdArray:
    """Return a prompt's ids as a list of ints, [length]; int32 arrays stay packed.

    Accepts lists, arrays and tensors of [length] or [1, length], and mappings with ``input_ids``,
    as tokenizers return them. Raises InvalidRequest for any other value.
    """
    if isinstance(given, Mapping):
        if "input_ids" not in given:
            raise _invalid_ids(f"a {type(given).__name__} without input_ids")
        given = given["input_ids"]
    if hasattr(given, "detach"):
        given = given.detach().cpu().numpy()
    if isinstance(given, list | tuple):
        # The usual case. `type`, because True is an int; `set`, because most lists have one type.
        kinds = set(map(type, given))
        if kinds <= {int}:
            return given if isinstance(given, list) else list(given)
        if len(given) == 1 and not kinds & {str, bytes}:
            only = given[0]
            if isinstance(only, list | tuple | np.ndarray) or hasattr(only, "detach"):
                return token_ids(only)
        if all(type(i) is int or isinstance(i, np.integer) for i in given):
            return [int(i) for i in given]
        odd = next(i for i in given if type(i) is not int)
        raise _invalid_ids(f"a {type(given).__name__} with {odd!r:.60} ({type(odd).__name__})")
    if not isinstance(given, np.ndarray):
        raise _invalid_ids(f"{type(given).__name__} {given!r:.60}")
    ids = given[0] if given.ndim == 2 and len(given) == 1 else given
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise _invalid_ids(f"{given.dtype.name} of the shape {list(given.shape)}")
    return ids if ids.dtype == np.int32 else [int(i) for i in ids.tolist()]


def _invalid_ids(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"input_ids is {what}: it must be one prompt's token ids, integers in a list, an "
        "array or a tensor of the shape [length] or [1, length]",
        param="input_ids",
    )


@dataclass(frozen=True, slots=True)
class GenerationHyperparameters:
    """The sampling parameters of one completion.

    ``temperature`` 0 means greedy. ``top_k`` -1 means off. Stop strings end the output at the
    token that completes one; ``stop_token_ids`` at the token itself (which stays in the output).
    With ``seed``, a signed 64-bit integer, the draw of a token depends only on its distribution,
    the seed and its position in prompt + output. The fields after ``seed`` change the distribution
    itself, and are neutral by default.
    """

    max_new_tokens: int = 16_384
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one's probability are never drawn."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and the number that is added to its logit."""
    grammar: str | None = None
    """The form of the output's text, as JSON: ``{"json_schema": {...}}``, ``{"json_object": true}``
    or ``{"regex": "..."}``."""

    def new(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; lists and a single stop become tuples.

        ``n_samples`` may only be 1: a request samples one completion. Raises ValueError for another
        number, and TypeError for an unknown field.
        """
        samples = changes.pop("n_samples", 1)
        if samples != 1:
            raise ValueError(
                f"n_samples is {samples!r}: a request samples one completion. Run the workflow "
                "more often for one item (sessions.group_size), or send several requests"
            )
        for name, value in changes.items():
            if isinstance(value, list):
                changes[name] = tuple(value)
            elif (name == "stop" and isinstance(value, str)) or (
                name == "stop_token_ids" and isinstance(value, int)
            ):
                changes[name] = (value,)
        try:
            return replace(self, **changes)
        except TypeError:
            known = {field.name for field in fields(self)}
            unknown = ", ".join(sorted(changes.keys() - known))
            raise TypeError(
                f"unknown sampling fields: {unknown}; use {', '.join(sorted(known))}"
            ) from None

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> Self:
        """Return a copy that also stops at the tokenizer's padding and end tokens, if it has
        them."""
        more = [tokenizer.pad_token_id, tokenizer.eos_token_id]
        ids = dict.fromkeys([*self.stop_token_ids, *(int(i) for i in more if i is not None)])
        return replace(self, stop_token_ids=tuple(ids))

    def to_openai_args_dict(
        self,
        exclude_args: Sequence[str] = (),
        api_format: Literal["completions", "responses", "openai-agents"] = "completions",
    ) -> dict[str, Any]:
        """Return the fields that OpenAI's client accepts, as keyword arguments of its calls.

        ``completions``: arguments of ``chat.completions.create``; ``responses``: of
        ``responses.create``; ``openai-agents``: of the Agents SDK's ``ModelSettings``.
        ``exclude_args`` are left out, by their names here or there. Fields without a name in these
        APIs (``top_k``, ``stop_token_ids``, ``ignore_eos``, ...) are left out, too.
        """
        limit = {
            "completions": "max_completion_tokens",
            "responses": "max_output_tokens",
            "openai-agents": "max_tokens",
        }[api_format]
        out: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            limit: self.max_new_tokens,
        }
        if api_format != "responses":
            out["frequency_penalty"] = self.frequency_penalty
            out["presence_penalty"] = self.presence_penalty
        if api_format == "completions" and self.stop:
            out["stop"] = list(self.stop)
        excluded = {limit if name == "max_new_tokens" else name for name in exclude_args}
        return {name: value for name, value in out.items() if name not in excluded}


@dataclass(frozen=True, slots=True, init=False)
class ModelRequest:
    """One request to an inference engine, by token ids or by a text prompt; it returns token ids.

    ``input_ids`` may be a list, an array or a tensor of the shape [length] or [1, length], or a
    tokenizer's result (a mapping with ``input_ids``); it becomes a list of ints, except that int32
    arrays stay as they are. A ``prompt`` is a chat, or a text that becomes one user message:
    engines that know the model's chat format (:class:`~any_agent.RemoteSGLangEngine`) render it.
    ``temperature`` and ``max_tokens`` are fields of ``gconfig`` under OpenAI's names.

    Raises InvalidRequest for invalid ids; ValueError for ``input_ids`` beside a ``prompt``, and
    for a ``gconfig`` that contradicts ``temperature`` or ``max_tokens``.
    """

    rid: str
    """The conversation's id: its requests go to the same engine of several, which has the
    beginning of the conversation in its cache."""
    input_ids: list[int] | IdArray
    gconfig: GenerationHyperparameters
    cache_salt: str | None
    top_logprobs: int
    """The number of likeliest tokens to report at each position."""
    tokenizer: Any = field(repr=False, compare=False)
    """The workflow's tokenizer, if it has one, which decodes the response's text. Engines that
    check stop strings have their own."""
    prompt: list[Message] | str | None
    model: str
    """The caller's name for the model; an engine has one model."""
    adapter: str | None
    """The LoRA adapter of the engine that samples; None: the model alone."""

    def __init__(
        self,
        rid: str | None = None,
        input_ids: Any = (),
        gconfig: GenerationHyperparameters | None = None,
        cache_salt: str | None = None,
        top_logprobs: int = 0,
        tokenizer: Any = None,
        prompt: list[Message] | str | None = None,
        model: str = "default",
        temperature: float | None = None,
        max_tokens: int | None = None,
        adapter: str | None = None,
    ) -> None:
        ids = token_ids(input_ids)
        if prompt is not None and len(ids):
            raise ValueError("a request has input_ids or a prompt: leave one of them out")
        named = {"temperature": temperature, "max_new_tokens": max_tokens}
        given = {name: value for name, value in named.items() if value is not None}
        for name, value in given.items():
            if gconfig is not None and getattr(gconfig, name) != value:
                called = "max_tokens" if name == "max_new_tokens" else name
                raise ValueError(
                    f"{called} is {value!r}, and gconfig.{name} is {getattr(gconfig, name)!r}: "
                    "give one of them"
                )
        values = {
            "rid": uuid.uuid4().hex if rid is None else rid,
            "input_ids": ids,
            "gconfig": gconfig or GenerationHyperparameters(**given),  # type: ignore[arg-type]
            "cache_salt": cache_salt,
            "top_logprobs": top_logprobs,
            "tokenizer": tokenizer,
            "prompt": prompt,
            "model": model,
            "adapter": adapter,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def temperature(self) -> float:
        return self.gconfig.temperature

    @property
    def max_tokens(self) -> int:
        return self.gconfig.max_new_tokens

    def require_ids(self) -> None:
        """Raise InvalidRequest for a prompt that was not rendered as token ids."""
        if self.prompt is not None:
            raise InvalidRequest(
                "this engine takes token ids, and the request has a prompt: give "
                "input_ids=tokenizer.apply_chat_template(messages, add_generation_prompt=True), or "
                "ask an any_agent.RemoteSGLangEngine, which knows the model's chat template",
                param="prompt",
            )


LLMRequest = ModelRequest
"""AReaL-lite's name of :class:`ModelRequest`."""


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """Some freshly sampled tokens of one request, in order; only the last chunk has a stop reason.

    ``logprobs[k]`` is log-softmax(logits / T) of ``output_ids[k]`` under the weights of
    ``versions[k]``; no renormalisation by top_p or top_k.
    """

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    stop_reason: StopReason | None = None
    matched_stop: str | int | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """The likeliest ids of each token with their log-probabilities, best first, if requested."""
    bound: list[bool] | None = None
    """True for each token that the grammar decided in part: the tokens that it forbade there had
    more than 1e-4 of the model's probability. None without a grammar, and where the engine does
    not tell."""
    adapter: str | None = None
    """The LoRA adapter that sampled, ``NAME@FINGERPRINT``; None: the model alone."""

    def __post_init__(self) -> None:
        n = len(self.output_ids)
        if not n == len(self.logprobs) == len(self.versions):
            raise ValueError("a chunk needs one logprob and one version per token")
        if self.top_logprobs is not None and len(self.top_logprobs) != n:
            raise ValueError("a chunk needs the likeliest tokens of all its tokens, or of none")
        if self.bound is not None and len(self.bound) != n:
            raise ValueError("a chunk says of all its tokens whether they are bound, or of none")


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """A complete response: the concatenation of its chunks."""

    input_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    matched_stop: str | int | None = None
    tokenizer: Any = field(default=None, repr=False, compare=False)
    """The tokenizer of :attr:`text`: the request's, or the engine's."""

    @property
    def text(self) -> str:
        """The output without special tokens, and without the stop string that ended it.

        Raises ConfigError where no tokenizer is known.
        """
        if self.tokenizer is None:
            raise ConfigError(
                "this response has token ids and no tokenizer: give the request's tokenizer=, or "
                "decode output_tokens"
            )
        ids, stop = self.output_ids, self.matched_stop
        if isinstance(stop, int) and ids[-1:] == [stop]:
            ids = ids[:-1]
        text = str(
            self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
        return text.partition(stop)[0] if isinstance(stop, str) else text

    @property
    def token_ids(self) -> list[int]:
        return self.output_ids

    @property
    def logprobs(self) -> list[float]:
        return self.output_logprobs

    @property
    def input_tokens(self) -> list[int]:
        return self.input_ids

    @property
    def output_tokens(self) -> list[int]:
        return self.output_ids

    @property
    def input_len(self) -> int:
        return len(self.input_ids)

    @property
    def output_len(self) -> int:
        return len(self.output_ids)
