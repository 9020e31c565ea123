"""The GPUs that a model needs: ``python -m benchmarks.gpu.sizing`` prints the tables of gpus.md.

Bytes are counted, not measured: weights, gradients and optimizer exactly, activations by what a
backward pass of one layer keeps (`tests/benchmarks/test_sizing.py` compares that with torch's
count). Runtime, fragments and kernels' workspaces are the tenth of a card that is left free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

if __package__ in (None, ""):
    raise SystemExit("run it from the repository's folder: python -m benchmarks.gpu.sizing")

from benchmarks.gpu.shapes import SHAPES, Shape
from trainer.pass_size import kept_bytes, layer_numbers

GB = 1e9
USABLE = 0.9
"""The usable share of a card's memory."""
MASTER, GRADIENT, MOMENTS = 4, 4, 8
"""Bytes for each parameter, in float32, divided over the processes."""
COMPUTE = 2
"""Bytes of a number that passes compute with, bfloat16."""
HEAD_CHUNK = 1024
"""Trained tokens whose logits exist at once, as in the trainer."""
CARDS = {"24 GB": 24, "48 GB": 48, "80 GB": 80, "141 GB": 141}
"""Sizes of cards such as RTX 4090 or A10G, L40S, A100 or H100, H200."""


@dataclass(frozen=True, slots=True)
class Training:
    """Bytes on each GPU during a step; ``host``: bytes of each process outside the GPU."""

    state: float
    """Weights, gradients and moments: this process's share."""
    gathered: float
    """Layers that are gathered while they compute, and their gathered gradients."""
    activations: float
    logits: float
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.state + self.gathered + self.activations + self.logits


def training(
    shape: Shape,
    processes: int,
    *,
    tokens: int,
    checkpointing: bool = True,
    offload: bool = False,
) -> Training:
    """Return the need of one of ``processes``, with ``tokens`` in a forward pass.

    The arguments are train.processes (times cluster.training_nodes), train.micro_batch_tokens,
    train.gradient_checkpointing and train.offload_optimizer."""
    state = shape.parameters * (MASTER + GRADIENT + MOMENTS) / processes
    # The layer at work, the next one that is fetched meanwhile, one whose gradient is divided; and
    # embedding and head, which are at work from the first layer to the last.
    layers = shape.layer_parameters * (2 * COMPUTE + GRADIENT)
    ends = shape.embedding_parameters * (COMPUTE + GRADIENT)
    layer = layer_activations(shape) * tokens
    inputs = shape.hidden * COMPUTE * tokens
    activations = kept_bytes(shape.layers, layer, inputs, checkpointing=checkpointing)
    # In float32: the logits, the logits divided by the temperature, and their gradient.
    logits = 3.0 * 4 * min(tokens, HEAD_CHUNK) * shape.vocab
    return Training(
        0.0 if offload else state, layers + ends, activations, logits, state if offload else 0.0
    )


def layer_activations(shape: Shape) -> float:
    """Return the bytes per token that one layer keeps for its backward pass in bfloat16."""
    attention = (shape.heads + shape.kv_heads) * shape.head_dim
    return COMPUTE * layer_numbers(shape.hidden, attention, shape.intermediate)


@dataclass(frozen=True, slots=True)
class Serving:
    """Bytes on each GPU of an engine."""

    weights: float
    cache: float

    @property
    def total(self) -> float:
        return self.weights + self.cache


def serving(shape: Shape, gpus: int, *, cached_tokens: int) -> Serving:
    """Return the need of each of an engine's ``gpus`` (engine.gpus) for so many cached tokens.

    Cached tokens are the number of concurrent sessions times their length."""
    return Serving(shape.parameters * COMPUTE / gpus, shape.cache_bytes * cached_tokens / gpus)


def weights_bytes(shape: Shape) -> float:
    """Return the bytes of one published version, which a weight update moves to each engine."""
    return float(shape.parameters * COMPUTE)


def fewest(need: Iterable[tuple[int, float]], card: float) -> int | None:
    """Return the first number of GPUs, of (number, bytes on each), that fits cards of GB."""
    return next((n for n, size in need if size <= USABLE * card * GB), None)


def training_gpus(
    shape: Shape, card: float, *, tokens: int = 16_384, offload: bool = False
) -> int | None:
    """Return the fewest GPUs of this size that train it, of 1, 2, 4, ... 64; None: not even 64."""
    return fewest(
        (
            (n, training(shape, n, tokens=tokens, offload=offload).total)
            for n in (1, 2, 4, 8, 16, 32, 64)
        ),
        card,
    )


def serving_gpus(shape: Shape, card: float, *, cached_tokens: int = 131_072) -> int | None:
    """Return the same for one engine, which uses the GPUs of one machine, so 8 at most."""
    numbers = [n for n in (1, 2, 4, 8) if shape.kv_heads % n == 0]
    return fewest(
        ((n, serving(shape, n, cached_tokens=cached_tokens).total) for n in numbers), card
    )


# -- tables ----------------------------------------------------------------------------------------

MODELS = ("0.6B", "4B", "8B", "32B")


def tables() -> str:
    """Return Markdown tables: each model's need, and the number of GPUs that it fits on."""
    return "\n\n".join((_bytes_table(), _cards_table()))


def _bytes_table() -> str:
    rows = [
        "| Qwen3 | parameters | weights, bf16 | cache for 1,000 tokens | training state | "
        "+ at work, 16,384 tokens | + at work, 4,096 tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for shape in (SHAPES[name] for name in MODELS):
        whole = training(shape, 1, tokens=16_384)
        less = training(shape, 1, tokens=4096)
        rows.append(
            f"| {shape.name} | {shape.parameters / 1e9:.2f} B | {_gb(weights_bytes(shape))} | "
            f"{shape.cache_bytes * 1000 / 1e6:.0f} MB | {_gb(whole.state)} | "
            f"{_gb(whole.total - whole.state)} | {_gb(less.total - less.state)} |"
        )
    return "\n".join(rows)


def _cards_table() -> str:
    head = "| Qwen3 | | " + " | ".join(CARDS) + " |"
    rows = [head, "|---|---|" + "---|" * len(CARDS)]
    kinds: dict[str, Callable[[Shape, float], int | None]] = {
        "an engine": lambda shape, card: serving_gpus(shape, card),
        "training": lambda shape, card: training_gpus(shape, card),
        "training, `micro_batch_tokens=4096`": lambda shape, card: training_gpus(
            shape, card, tokens=4096
        ),
        "training, offloaded, 4,096 tokens": lambda shape, card: training_gpus(
            shape, card, tokens=4096, offload=True
        ),
    }
    for name in MODELS:
        for kind, count in kinds.items():
            counts = (count(SHAPES[name], card) for card in CARDS.values())
            rows.append(f"| {name} | {kind} | " + " | ".join(str(n or "-") for n in counts) + " |")
    return "\n".join(rows)


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB"


if __name__ == "__main__":
    print(tables())
