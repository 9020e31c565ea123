"""What is checked before a request reaches the model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from any_agent.errors import ContextLengthExceeded, InvalidRequest
from any_agent.types import GenerationHyperparameters

if TYPE_CHECKING:
    from any_agent.engine.embedded.model_loader import LoadedModel

MAX_STOPS = 64
MAX_TOP = 100
MAX_STOP_LENGTH = 4096


def check_request(
    ids: list[int],
    config: GenerationHyperparameters,
    loaded: LoadedModel,
    max_total_tokens: int | None,
) -> GenerationHyperparameters:
    """The parameters, ``max_new_tokens`` clamped to the room that the context leaves.

    Raises InvalidRequest; ContextLengthExceeded if the prompt leaves no room.
    """
    check_ids(ids, loaded.vocab_size)
    check_sampling(config)
    _check_bias(config.logit_bias, loaded.vocab_size)
    room = loaded.context_length - len(ids)
    if max_total_tokens is not None:
        room = min(room, max_total_tokens - len(ids))
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {len(ids)} tokens and leaves no room in a context of "
            f"{loaded.context_length}"
        )
    return config if config.max_new_tokens <= room else config.new(max_new_tokens=room)


def check_ids(ids: list[int], vocab_size: int) -> None:
    if not ids:
        raise InvalidRequest("input_ids is empty", param="input_ids")
    # type() because True is an int; set() because most prompts hold one type.
    if set(map(type, ids)) != {int}:
        raise InvalidRequest("input_ids must be a list of integers", param="input_ids")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise InvalidRequest(
            f"input_ids must be 0 .. {vocab_size - 1}, the vocabulary", param="input_ids"
        )


def check_top(count: int, vocab_size: int) -> None:
    if not 0 <= count <= min(MAX_TOP, vocab_size):
        raise InvalidRequest(
            f"top_logprobs_num must be 0 .. {min(MAX_TOP, vocab_size)}", param="top_logprobs_num"
        )


def _check_bias(biases: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    tokens = {token for token, _ in biases}
    if len(tokens) != len(biases) or any(not 0 <= token < vocab_size for token in tokens):
        raise InvalidRequest(
            f"logit_bias must name different ids, 0 .. {vocab_size - 1}", param="logit_bias"
        )
    if not all(math.isfinite(bias) for _, bias in biases):
        raise InvalidRequest("logit_bias must be finite", param="logit_bias")


def check_sampling(config: GenerationHyperparameters) -> None:
    def refuse(name: str, says: str) -> None:
        raise InvalidRequest(f"{name} must be {says}, got {getattr(config, name)!r}", param=name)

    if not (math.isfinite(config.temperature) and 0 <= config.temperature <= 1e4):
        refuse("temperature", "a finite number, 0 .. 10000")
    if not 0 < config.top_p <= 1:
        refuse("top_p", "in (0, 1]")
    if config.top_k != -1 and config.top_k < 1:
        refuse("top_k", "-1 (off) or at least 1")
    if not 0 <= config.min_p <= 1:
        refuse("min_p", "in [0, 1]")
    if not -2 <= config.frequency_penalty <= 2:
        refuse("frequency_penalty", "in [-2, 2]")
    if not -2 <= config.presence_penalty <= 2:
        refuse("presence_penalty", "in [-2, 2]")
    if not 0 < config.repetition_penalty <= 2:
        refuse("repetition_penalty", "in (0, 2]")
    if config.seed is not None and not -(2**63) <= config.seed < 2**63:
        refuse("seed", "a signed 64-bit integer")
    if config.max_new_tokens < 0:
        refuse("max_new_tokens", "at least 0")
    if len(config.stop) > MAX_STOPS or any(not 0 < len(s) <= MAX_STOP_LENGTH for s in config.stop):
        refuse("stop", f"at most {MAX_STOPS} strings of 1 .. {MAX_STOP_LENGTH} characters")
