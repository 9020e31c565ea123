"""Helpers of the embedded engine's tests: reference log-probabilities, models that wait or fail."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.engine.embedded.model_loader import LoadedModel
from any_agent.types import GenerationHyperparameters, ModelRequest

Serve: TypeAlias = Callable[..., Awaitable[str]]
"""The fixture ``serve``: an engine to the URL where it is served."""
LIMIT = 60.0
"""Seconds until a test that waits for the engine gives up."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return [4 + (31 * seed + 7 * i) % 370 for i in range(length)]


def request(rid: str, ids: list[int], **config: Any) -> ModelRequest:
    values = {"max_new_tokens": 8, "ignore_eos": True} | config
    return ModelRequest(rid, ids, GenerationHyperparameters(**values))


def fresh_logprobs(
    model: Any, prompt_ids: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """log-softmax(logits / T) of each output token by one pass over the whole context."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt_ids, *output]]), use_cache=False).logits
        scaled = logits[0, len(prompt_ids) - 1 : -1].float() / temperature
        return torch.log_softmax(scaled, -1).gather(-1, torch.tensor(output)[:, None])[:, 0]


def worst(ours: Sequence[float], reference: torch.Tensor) -> float:
    return (torch.tensor(ours) - reference).abs().max().item()


def error_of(
    model: Any,
    prompt_ids: Sequence[int],
    output: Sequence[int],
    logprobs: Sequence[float],
    temperature: float = 1.0,
) -> float:
    """How far log-probabilities are off from those of a fresh pass, at most."""
    return worst(logprobs, fresh_logprobs(model, prompt_ids, output, temperature))


class WrappedModel:
    """A model whose forward passes go through ``around``; everything else is the model's."""

    def __init__(self, model: Any, around: Callable[[Callable[[], Any], int], Any]) -> None:
        self._model = model
        self._around = around
        self.calls = 0

    def __call__(self, **kwargs: Any) -> Any:
        self.calls += 1
        return self._around(lambda: self._model(**kwargs), self.calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class Gate:
    """Lets a given number of forward passes through; ``arrived`` counts those that came."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._arrived = threading.Semaphore(0)

    def around(self, forward: Callable[[], Any], call: int) -> Any:
        self._arrived.release()
        assert self._permits.acquire(timeout=LIMIT), "the test never let this step run"
        return forward()

    def let(self, steps: int) -> None:
        self._permits.release(steps)

    def wait_for_step(self) -> None:
        """Until one more pass has come to the gate. Blocks: call it in a thread."""
        assert self._arrived.acquire(timeout=LIMIT)


def wrapped(
    loaded: LoadedModel, around: Callable[[Callable[[], Any], int], Any], **options: Any
) -> EmbeddedEngine:
    from any_agent.engine.embedded.engine import EngineOptions

    model = WrappedModel(loaded.model, around)
    return EmbeddedEngine(replace(loaded, model=model), EngineOptions(**options))
