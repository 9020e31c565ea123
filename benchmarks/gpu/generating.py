"""The embedded engine's speed: requests side by side, without HTTP."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.model_loader import LoadedModel
from any_agent.types import GenerationHyperparameters, ModelRequest
from benchmarks.gpu.shapes import Shape


@dataclass(frozen=True, slots=True)
class Generated:
    """The result of ``requests`` at once: tokens sampled per second, all together."""

    requests: int
    tokens_per_second: float
    first_token_ms: float
    """Seconds until the median request has its first token."""
    peak_gb: float
    """Peak of the GPU's memory, 1e9 bytes; 0 on a CPU."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def generating(
    shape: Shape,
    device: str,
    dtype: torch.dtype,
    *,
    concurrency: list[int],
    prompt: int,
    new: int,
    rounds: int,
) -> list[Generated]:
    """Measure a random model of this shape with each number of requests; return the medians.

    Each is run ``rounds`` times after a warm-up. Prompts differ from their first token on: nothing
    is shared."""
    loaded = random_model(shape, device, dtype)
    return asyncio.run(_all(loaded, concurrency, prompt, new, rounds))


def random_model(shape: Shape, device: str, dtype: torch.dtype) -> LoadedModel:
    """Make the model on its device; nothing is read or loaded."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            shape.config(), dtype=dtype, attn_implementation="sdpa"
        )
    model.eval().requires_grad_(False)
    return LoadedModel(
        model=model,
        # Ids go in, and ids come out.
        tokenizer=None,
        path=shape.name,
        device=torch.device(device),
        dtype=dtype,
        vocab_size=shape.vocab,
        context_length=shape.positions,
        eos_ids=frozenset(),
        cache_layers=shape.layers,
    )


async def _all(
    loaded: LoadedModel, concurrency: list[int], prompt: int, new: int, rounds: int
) -> list[Generated]:
    options = EngineOptions(max_running_requests=max(concurrency), seed=0)
    found = []
    async with EmbeddedEngine(loaded, options) as engine:
        for requests in concurrency:
            await _round(engine, requests, prompt, min(new, 16))
            _reset_peak(loaded.device)
            results = [await _round(engine, requests, prompt, new) for _ in range(rounds)]
            found.append(
                Generated(
                    requests=requests,
                    tokens_per_second=requests * new / statistics.median(r[0] for r in results),
                    first_token_ms=1000 * statistics.median(r[1] for r in results),
                    peak_gb=peak_gb(loaded.device),
                )
            )
            await engine.clear_cache()
    return found


async def _round(
    engine: EmbeddedEngine, requests: int, prompt: int, new: int
) -> tuple[float, float]:
    """Return the seconds until all are done, and until the median one has begun."""
    rng = random.Random(requests)
    vocab = engine.loaded.vocab_size
    began = time.perf_counter()

    async def one() -> float:
        ids = [rng.randrange(vocab) for _ in range(prompt)]
        config = GenerationHyperparameters(max_new_tokens=new, ignore_eos=True)
        first, sampled = 0.0, 0
        async for chunk in engine.generate(ModelRequest(input_ids=ids, gconfig=config)):
            first = first or time.perf_counter() - began
            sampled += len(chunk.output_ids)
        if sampled != new:
            raise RuntimeError(f"the engine sampled {sampled} tokens, but {new} were requested")
        return first

    firsts = await asyncio.gather(*(one() for _ in range(requests)))
    return time.perf_counter() - began, statistics.median(firsts)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float:
    """Return the peak of the tensors' memory since its reset."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
