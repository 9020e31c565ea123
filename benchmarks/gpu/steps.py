"""The trainer's speed: whole optimizer steps, and the time to gather the weights."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu.generating import peak_gb
from benchmarks.gpu.shapes import Shape
from trainer.packing import Row, with_training_signal
from trainer.policy import Policy, PolicyConfig

_BUCKET = 1 << 30
"""Bytes of weights that are gathered at a time."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """One optimizer step over ``tokens`` in rows of ``length``, half of them trained."""

    tokens: int
    length: int
    seconds: float
    tokens_per_second: float
    tflops: float
    """The model's own work per second, 1e12 FLOP/s, without recomputation."""
    mfu: float | None
    """The share of the card's peak; None for an unknown card."""
    peak_gb: float
    gather_seconds: float
    """Seconds to gather all weights in bfloat16, bucket by bucket."""
    gather_gb_per_second: float
    to_host_seconds: float
    """The same, with each bucket copied to the machine's memory, as for the disk."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def stepping(
    shape: Shape,
    device: str,
    *,
    compute: torch.dtype | None,
    rows: int,
    length: int,
    micro_batch_tokens: int,
    rounds: int,
    peak_tflops: float | None,
    offload: bool = False,
) -> Stepped:
    """Measure a random model of this shape, in float32 and computing in ``compute``.

    It trains as the trainer does with train.gradient_checkpointing: one step to warm up, then the
    median of ``rounds``."""
    policy = _policy(shape, device, compute, offload)
    batch = _rows(shape, rows, length)
    trained = sum(int(row["loss_mask"].sum()) for row in batch)
    policy.train(batch, micro_batch_tokens)
    if policy.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(policy.device)
    seconds = statistics.median(
        _timed(policy.device, lambda: policy.train(batch, micro_batch_tokens))
        for _ in range(rounds)
    )
    peak = peak_gb(policy.device)
    gather = statistics.median(_timed(policy.device, lambda: _gather(policy)) for _ in range(3))
    to_host = _timed(policy.device, lambda: _gather(policy, to_host=True))
    # One part forward, two parts backward.
    tflops = 3 * shape.forward_flops(rows * length, length, trained) / seconds / 1e12
    size = sum(
        tensor.nbytes for part in policy.buckets(_BUCKET, torch.bfloat16) for _, tensor in part
    )
    return Stepped(
        tokens=rows * length,
        length=length,
        seconds=seconds,
        tokens_per_second=rows * length / seconds,
        tflops=tflops,
        mfu=tflops / peak_tflops if peak_tflops is not None else None,
        peak_gb=peak,
        gather_seconds=gather,
        gather_gb_per_second=size / 1e9 / gather,
        to_host_seconds=to_host,
    )


def _policy(shape: Shape, device: str, compute: torch.dtype | None, offload: bool) -> Policy:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    # On its device, because drawing large weights on a CPU is slow.
    with torch.device("cpu" if offload else device):
        model = AutoModelForCausalLM.from_config(
            shape.config(), dtype=torch.float32, attn_implementation="sdpa"
        )
    config = PolicyConfig(
        device=device, dtype=compute, gradient_checkpointing=True, offload=offload
    )
    return Policy(model, config)


def _rows(shape: Shape, rows: int, length: int) -> list[Row]:
    """Return random tokens; the second half of each row is trained on."""
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(rows):
        mask = torch.zeros(length, dtype=torch.int32)
        mask[length // 2 :] = 1
        row = {
            "input_ids": torch.randint(
                shape.vocab, (length,), generator=generator, dtype=torch.int32
            ),
            "loss_mask": mask,
            # That of a uniform distribution over the vocabulary, which random weights are close to.
            "logprobs": -torch.log(torch.tensor(float(shape.vocab))) * mask,
            "versions": torch.where(mask.bool(), 0, -1).int(),
            "attention_mask": torch.ones(length, dtype=torch.bool),
        }
        out.append(with_training_signal(row, advantage=rng.choice((-1.0, 1.0)), temperature=1.0))
    return out


def _gather(policy: Policy, *, to_host: bool = False) -> None:
    for bucket in policy.buckets(_BUCKET, torch.bfloat16):
        for _, tensor in bucket:
            if to_host:
                tensor.cpu()


def _timed(device: torch.device, work: Any) -> float:
    _finish(device)
    began = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
