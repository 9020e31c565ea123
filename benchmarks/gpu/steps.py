"""The trainer's speed: whole optimizer steps, and the time to gather the weights."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from benchmarks.gpu.generating import peak_gb
from benchmarks.gpu.shapes import Shape
from benchmarks.training_rows import Workload, chain, length, make_rows
from trainer.model import PolicyConfig
from trainer.packing import Pass
from trainer.policy import Policy
from trainer.rows import Row

WORKLOADS = {
    "plain": Workload("16 rows of 4,096 tokens, nothing shared", 16, 1, 0, (-1,), 2048, 2048),
    "turns": Workload("8 sessions x 8 turns, one system prompt", 1, 8, 2048, chain(8), 256, 256),
    "branches": Workload(
        "16 branching sessions in 4 groups", 4, 4, 1024, (-1, 0, 1, 0, 3), 128, 256
    ),
}
Packing = Literal["tree", "rows"]
_LR = 1e-12
"""A rate that changes nothing that shows, so that every step has the same loss."""
_BUCKET = 1 << 30
"""Bytes of weights that are gathered at a time."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """One optimizer step over rows that have ``tokens`` together."""

    tokens: int
    computed: int
    """The tokens that a step computes forward: with packing, a shared prefix once."""
    seconds: float
    mfu: float | None
    """The share of the card's peak that the model's own work on the computed tokens makes, without
    recomputation; None for an unknown card."""
    effective_mfu: float | None
    """The same with the work of the rows, each by itself."""
    tflops: float
    """The work on the computed tokens per second, 1e12 FLOP/s."""
    peak_gb: float
    loss: float
    grad_norm: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The weights in bfloat16, as for an update of the engines."""

    seconds: float
    """Seconds to gather all of them, bucket by bucket."""
    gb_per_second: float
    to_host_seconds: float
    """The same, with each bucket copied to the machine's memory, as for the disk."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Steps:
    """A random model of a shape, in float32, that computes in ``compute``."""

    def __init__(
        self,
        shape: Shape,
        device: str,
        *,
        compute: torch.dtype | None,
        compile: bool = False,
        checkpointing: bool = False,
        offload: bool = False,
    ) -> None:
        self.shape = shape
        # On its device, because drawing large weights on a CPU is slow.
        model = _model(shape, "cpu" if offload else device)
        config = PolicyConfig(
            lr=_LR,
            device=device,
            dtype=compute,
            compile=compile,
            gradient_checkpointing=checkpointing,
            offload=offload,
        )
        began = time.perf_counter()
        self.policy = Policy(model, config)
        self.prepared_seconds = time.perf_counter() - began
        """The seconds to prepare the model, which compiles its layers."""

    def measure(
        self,
        workload: Workload,
        packing: Packing,
        *,
        micro_batch_tokens: int | None,
        rounds: int,
        peak_tflops: float | None,
    ) -> Stepped:
        """Make one step to warm up, then ``rounds``, of which the median counts.

        ``micro_batch_tokens`` bounds a pass; None: what the trainer chooses for this device.
        """
        policy, rows = self.policy, make_rows(workload, self.shape.vocab).rows
        policy.runner.packing = packing
        gc.collect()
        if policy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(policy.device)
        result = policy.train(rows, micro_batch_tokens)
        seconds = statistics.median(
            _timed(policy.device, lambda: policy.train(rows, micro_batch_tokens))
            for _ in range(rounds)
        )
        computed, work = _work(self.shape, policy.runner.plan(rows, micro_batch_tokens))
        # One part forward, two parts backward.
        tflops = 3 * work / seconds / 1e12
        effective = 3 * _work_of_rows(self.shape, rows) / seconds / 1e12
        return Stepped(
            tokens=sum(map(length, rows)),
            computed=computed,
            seconds=seconds,
            mfu=tflops / peak_tflops if peak_tflops is not None else None,
            effective_mfu=effective / peak_tflops if peak_tflops is not None else None,
            tflops=tflops,
            peak_gb=peak_gb(policy.device),
            loss=result.stats.loss,
            grad_norm=result.grad_norm,
        )

    def gather(self) -> Gathered:
        """Measure the gathering of the weights."""
        policy = self.policy
        seconds = statistics.median(_timed(policy.device, lambda: _gather(policy)) for _ in "abc")
        size = sum(t.nbytes for part in policy.buckets(_BUCKET, torch.bfloat16) for _, t in part)
        to_host = _timed(policy.device, lambda: _gather(policy, to_host=True))
        return Gathered(seconds, size / 1e9 / seconds, to_host)


def _work(shape: Shape, passes: Sequence[Pass]) -> tuple[int, float]:
    """Return the tokens that passes compute, without padding, and their work forward."""
    tokens, work = 0, 0.0
    for one in passes:
        if one.depths is None:
            ids, pairs = _of_rows_in(one)
        else:
            ids, pairs = one.ids.numel(), float((one.depths + 1).sum())
        tokens += ids
        work += shape.forward_flops(ids, pairs, len(one.items.sources.unique()))
    return tokens, work


def _of_rows_in(one: Pass) -> tuple[int, float]:
    """Return the tokens of a pass's rows up to their last trained ones, and their pairs."""
    rows, width = one.ids.shape
    ends = torch.zeros(rows, dtype=torch.int64)
    ends.scatter_reduce_(0, one.items.sources // width, one.items.positions, "amax")
    return int(ends.sum()), float((ends * (ends + 1) / 2).sum())


def _work_of_rows(shape: Shape, rows: Sequence[Row]) -> float:
    lengths = [length(row) for row in rows]
    trained = sum(int(row["loss_mask"].sum()) for row in rows)
    return shape.forward_flops(sum(lengths), sum(n * (n + 1) / 2 for n in lengths), trained)


def _model(shape: Shape, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            shape.config(), dtype=torch.float32, attn_implementation="sdpa"
        )


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
