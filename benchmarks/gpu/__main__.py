"""The speed of one GPU: ``python -m benchmarks.gpu``, run in the repository's folder.

Random weights at Qwen3's shapes: nothing is downloaded, and no SGLang is needed. For each model the
embedded engine on CUDA (tokens per second at several numbers of requests), the trainer's step over
each workload with shared prefixes computed once and by rows (seconds, model FLOPs utilisation, peak
memory), and the time to gather all weights, as a weight update does. A model that does not fit is
reported, and the others are measured. Without a GPU it prints an error and ends with code 2;
``--device cpu --models tiny`` shows that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# Rows have all lengths, so freed memory must be reusable for others.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "A10G": 70.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
}
"""Dense bfloat16 TFLOP/s by a part of a card's name, from the makers' data sheets."""
_INSTALL = (
    "pip install torch 'transformers>=5.23,<5.24' aiohttp httpx pydantic pyyaml orjson msgpack"
)


def main() -> int:
    args = _parser().parse_args()
    try:
        import torch

        from benchmarks.gpu.shapes import SHAPES
    except ImportError as error:
        return _unable(f"{error}: {_INSTALL}")
    if args.device == "cuda" and not torch.cuda.is_available():
        return _unable(
            "no CUDA GPU is here, or this torch is built without CUDA: nothing was measured"
        )
    if unknown := sorted(set(args.models) - set(SHAPES)):
        return _unable(f"--models {','.join(unknown)}: there are {', '.join(SHAPES)}")
    if unknown := sorted({*args.packing} - {"tree", "rows"}):
        return _unable(f"--packing {','.join(unknown)}: there are tree, rows")
    try:
        import benchmarks.gpu.generating  # noqa: F401
        from benchmarks.gpu.steps import WORKLOADS
    except ImportError as error:
        return _unable(f"{error}: {_INSTALL}")
    if unknown := sorted(set(args.workloads) - set(WORKLOADS)):
        return _unable(f"--workloads {','.join(unknown)}: there are {', '.join(WORKLOADS)}")
    figures = _measure(args)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--models", type=_names, default=["0.6B", "4B"], help="shapes, default 0.6B,4B")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--concurrency", type=_numbers, default=[1, 8, 32, 128], help="requests at once")
    add("--prompt", type=int, default=512, help="tokens of each prompt")
    add("--new", type=int, default=256, help="tokens sampled for each")
    add(
        "--workloads",
        type=_names,
        default=["plain", "turns", "branches"],
        help="the trainer's, default plain,turns,branches",
    )
    add("--packing", type=_names, default=["tree", "rows"], help="train.packing, default tree,rows")
    add("--micro-batch-tokens", type=int, help="tokens of a pass (default: what suits the device)")
    add(
        "--checkpointing",
        action="store_true",
        help="train with train.gradient_checkpointing, as the 4B shape needs to fit in 80 GB",
    )
    add("--no-compile", action="store_true", help="train with train.compile=false")
    add("--offload", action="store_true", help="train with train.offload_optimizer")
    add("--rounds", type=int, default=3, help="rounds, of which the median is shown")
    add("--skip-engine", action="store_true")
    add("--skip-trainer", action="store_true")
    add("--json", metavar="FILE", help="write the figures there")
    return parser


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    from benchmarks.gpu.shapes import SHAPES

    card, peak, product = _card(args.device)
    print(
        f"{time.strftime('%Y-%m-%d')}, {card}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    if product is not None:
        against = f"{peak:.0f} by its data sheet" if peak else "no data sheet known"
        print(f"a product of two 8192 x 8192 bfloat16 matrices: {product:.0f} TFLOP/s ({against})")
    figures: dict[str, Any] = {
        "card": card,
        "torch": torch.__version__,
        "peak_tflops": peak,
        "product_tflops": product,
        "models": {},
    }
    for name in args.models:
        shape = SHAPES[name]
        print(f"\n{name}: {shape.parameters / 1e9:.3f} B parameters", flush=True)
        found = figures["models"][name] = {"parameters": shape.parameters}
        if not args.skip_engine:
            found["engine"] = _or_too_large(lambda shape=shape: _engine(shape, args))
        if not args.skip_trainer:
            found["trainer"] = _or_too_large(
                lambda shape=shape: _trainer(shape, args, peak or product)
            )
    return figures


def _engine(shape: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    import torch

    from benchmarks.gpu.generating import generating

    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    found = generating(
        shape,
        args.device,
        dtype,
        concurrency=args.concurrency,
        prompt=args.prompt,
        new=args.new,
        rounds=args.rounds,
    )
    print(f"engine   {args.prompt} tokens in, {args.new} out")
    print("         requests  tokens/s  first token    peak")
    for one in found:
        print(
            f"         {one.requests:8}  {one.tokens_per_second:8.0f}  {one.first_token_ms:8.0f} ms"
            f"  {one.peak_gb:5.1f} GB",
            flush=True,
        )
    return [one.as_dict() for one in found]


def _trainer(shape: Any, args: argparse.Namespace, peak: float | None) -> dict[str, Any]:
    import torch

    from benchmarks.gpu.steps import WORKLOADS, Steps

    steps = Steps(
        shape,
        args.device,
        compute=torch.bfloat16 if args.device == "cuda" else None,
        compile=args.device == "cuda" and not args.no_compile,
        checkpointing=args.checkpointing,
        offload=args.offload,
    )
    found: dict[str, Any] = {
        "pass_tokens": args.micro_batch_tokens or steps.policy.runner.pass_tokens
    }
    how = "compiled" if steps.policy.runner.fused else "not compiled"
    print(f"trainer  the model prepared in {steps.prepared_seconds:.0f} s, its layers {how}")
    found |= {"compiled": steps.policy.runner.fused, "prepared_seconds": steps.prepared_seconds}
    weights = steps.gather()
    print(
        f"weights  gathered in {1000 * weights.seconds:.0f} ms ({weights.gb_per_second:.1f} GB/s, "
        f"in bfloat16), to the machine's memory in {1000 * weights.to_host_seconds:.0f} ms",
        flush=True,
    )
    found["weights"] = weights.as_dict()
    for name in args.workloads:
        workload = WORKLOADS[name] if args.device == "cuda" else WORKLOADS[name].smallest()
        print(f"trainer  {name}: {workload.about}")
        print("         packing  tokens  computed    step      MFU  effective     peak")
        found[name] = {}
        for packing in args.packing:
            one = _or_too_large(
                lambda workload=workload, packing=packing: steps.measure(
                    workload,
                    packing,
                    micro_batch_tokens=args.micro_batch_tokens,
                    rounds=args.rounds,
                    peak_tflops=peak,
                )
            )
            if one is None:
                # Its backward pass may have left gradients, which later figures would have.
                print("         the other steps of this model are not measured")
                return found
            print(
                f"         {packing:7} {one.tokens:7} {one.computed:9} {one.seconds:6.2f} s "
                f"{_share(one.mfu)} {_share(one.effective_mfu):>10} {one.peak_gb:5.1f} GB  "
                f"loss {one.loss:.6f}, gradient {one.grad_norm:.5f}",
                flush=True,
            )
            found[name][packing] = one.as_dict()
    return found


def _share(mfu: float | None) -> str:
    return f"{mfu:8.1%}" if mfu is not None else "       -"


def _or_too_large(measure: Any) -> Any:
    """Measure; report a card whose memory is too small, release it, and return None."""
    import torch

    try:
        return measure()
    except torch.OutOfMemoryError as error:
        print(f"         does not fit: {str(error).splitlines()[0]}", flush=True)
        return None
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _card(device: str) -> tuple[str, float | None, float | None]:
    """Return its name, its data sheet's dense bfloat16 TFLOP/s, and a large product's."""
    import torch

    if device == "cpu":
        return "no GPU (CPU)", None, None
    name = torch.cuda.get_device_name()
    peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    return name, peak, 10 * 2 * 8192**3 / (time.perf_counter() - began) / 1e12


def _unable(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 2


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in _names(text)]


if __name__ == "__main__":
    sys.exit(main())
