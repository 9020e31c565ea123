"""The embedded engine against ``model.generate``: ``python benchmarks/engine.py``.

The same prompts (128 tokens) and 64 new tokens each, sampled at temperature 1, end-of-text ignored,
one thread for the model, a random model of 0.85 M parameters. ``generate`` gets all prompts as one
batch, which is its best case; the engine gets them as separate requests at the same time, in one
process and over HTTP (a server in its own process). Rounds are interleaved and the medians shown,
because machines are noisy. CPU seconds are those of all threads of the engine's process; over HTTP
the client's are not counted.

Then one engine in process samples as many rows as it has adapters, 20: each by an adapter of its
own (rank 8, at all linear layers), all by one, and all without one; and so does an engine that has
no adapters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from common import child, finish, parser, ratio, wait_until_up

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

PROMPT, NEW = 128, 64
ADAPTERS, RANK = 20, 8
Round = Callable[[list[list[int]]], Awaitable[tuple[float, float]]]
"""Takes prompts; returns seconds of wall time and of CPU time."""


def prompts(n: int, seed: int) -> list[list[int]]:
    import random

    rng = random.Random(seed)
    return [[rng.randrange(4, 370) for _ in range(PROMPT)] for _ in range(n)]


def peer(model: Any) -> Round:
    import torch

    async def run(batch: list[list[int]]) -> tuple[float, float]:
        ids = torch.tensor(batch)
        wall, cpu = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=NEW,
                max_new_tokens=NEW,
            )
        assert out.shape[1] == PROMPT + NEW
        return time.perf_counter() - wall, time.process_time() - cpu

    return run


def in_process(engine: Any, adapters: Sequence[str] = ()) -> Round:
    """``adapters``: those of the prompts, in turn."""
    from any_agent.types import GenerationHyperparameters, ModelRequest

    config = GenerationHyperparameters(max_new_tokens=NEW, ignore_eos=True)

    async def one(i: int, ids: list[int]) -> None:
        adapter = adapters[i % len(adapters)] if adapters else None
        request = ModelRequest(f"r{i}", ids, config, adapter=adapter)
        generation = engine.submit(request, stream=False)
        await generation.finished()
        assert len(generation.request.output_ids) == NEW

    async def run(batch: list[list[int]]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one(i, ids) for i, ids in enumerate(batch)))
        return time.perf_counter() - wall, time.process_time() - cpu

    return run


def over_http(session: Any, url: str, pid: int, *, stream: bool) -> Round:
    import orjson
    import psutil

    process = psutil.Process(pid)
    sampling = {"max_new_tokens": NEW, "ignore_eos": True, "temperature": 1.0}

    async def one(ids: list[int]) -> None:
        body = {
            "input_ids": ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": stream,
        }
        async with session.post(f"{url}/generate", data=orjson.dumps(body)) as response:
            assert response.status == 200
            if not stream:
                assert len((await response.json())["output_ids"]) == NEW
                return
            async for _ in response.content:
                pass

    def cpu_now() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    async def run(batch: list[list[int]]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), cpu_now()
        await asyncio.gather(*(one(ids) for ids in batch))
        return time.perf_counter() - wall, cpu_now() - cpu

    return run


async def measure(args: argparse.Namespace, directory: str) -> None:
    import aiohttp

    from any_agent.demo.models.tiny import save_tiny_model
    from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
    from any_agent.runtime.ports import free_port

    path = save_tiny_model(Path(directory) / "model", hidden_size=128, layers=5)
    options = EngineOptions(max_running_requests=max(args.concurrency))
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = ["-m", "any_agent.engine.embedded", "--model-path", str(path), "--port", str(port)]
    log = Path(directory) / "engine.log"
    with child([*command, "--incremental-streaming-output"], log) as server:
        wait_until_up(server, f"{url}/get_model_info", log)
        async with (
            EmbeddedEngine.load(str(path), options) as engine,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            parameters = sum(p.numel() for p in engine.loaded.model.parameters())
            print(f"{parameters / 1e6:.2f} M parameters, prompt {PROMPT} + {NEW} new tokens")
            # Its own copy: the engine's model belongs to the engine's thread.
            copy = EmbeddedEngine.load(str(path)).loaded.model
            rounds = {
                "model.generate": peer(copy),
                "engine, in process": in_process(engine),
                "engine, HTTP": over_http(session, url, server.pid, stream=False),
                "engine, HTTP stream": over_http(session, url, server.pid, stream=True),
            }
            for n in args.concurrency:
                await table(rounds, n, args.rounds, peer="model.generate")
    await measure_adapters(args, path)


async def measure_adapters(args: argparse.Namespace, path: Path) -> None:
    from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions

    plain = EmbeddedEngine.load(str(path), EngineOptions(max_running_requests=args.adapters))
    folders = write_adapters(plain.loaded.model, path.with_name("adapters"), args.adapters)
    options = EngineOptions(max_running_requests=args.adapters, adapters=folders)
    names = list(folders)
    async with plain, EmbeddedEngine.load(str(path), options) as engine:
        rounds = {
            "one adapter": in_process(engine, names[:1]),
            f"{len(names)} adapters": in_process(engine, names),
            "no adapter": in_process(engine),
            "engine without any": in_process(plain),
        }
        await table(rounds, len(names), args.rounds, peer="one adapter")


def write_adapters(model: Any, root: Path, count: int) -> dict[str, str]:
    """Write adapters at all linear layers of the decoder, as peft does; return folders by name."""
    import torch
    from safetensors.torch import save_file

    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "bias": "none"}
    body = {id(m) for m in model.base_model.modules() if isinstance(m, torch.nn.Linear)}
    layers = {name: m for name, m in model.named_modules() if id(m) in body}
    out = {}
    for k in range(count):
        folder = root / f"a{k}"
        folder.mkdir(parents=True)
        tensors = {}
        for name, layer in layers.items():
            rows, columns = layer.weight.shape
            named = f"base_model.model.{name}.lora_"
            tensors[f"{named}A.weight"] = 0.02 * torch.randn(RANK, columns)
            tensors[f"{named}B.weight"] = 0.02 * torch.randn(rows, RANK)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
        out[folder.name] = str(folder)
    return out


async def table(rounds: dict[str, Round], n: int, repeats: int, *, peer: str) -> None:
    walls: dict[str, list[float]] = defaultdict(list)
    cpus: dict[str, list[float]] = defaultdict(list)
    # Small batches end soon: do several in a row, so that the clocks' steps do not matter.
    inner = max(1, 8 // n)
    for repeat in range(repeats + 1):
        for name, run in rounds.items():
            wall = cpu = 0.0
            for i in range(inner):
                w, c = await run(prompts(n, seed=100 * repeat + i))
                wall, cpu = wall + w, cpu + c
            if repeat:  # the first one warms up
                walls[name].append(wall / inner)
                cpus[name].append(cpu / inner)
    base = statistics.median(walls[peer])
    print(f"\n{n:>3} concurrent          tokens/s   ratio   CPU s per 1k tokens")
    for name in rounds:
        wall, cpu = statistics.median(walls[name]), statistics.median(cpus[name])
        tokens = n * NEW
        if name != peer:
            ratio(f"{name}, {n} at once / {peer}", wall, base)
        print(
            f"{name:<22} {tokens / wall:>9.0f}  {base / wall:>6.2f}   {1000 * cpu / tokens:>8.3f}"
        )


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=7)
    flags.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    flags.add_argument("--adapters", type=int, default=ADAPTERS)
    args = flags.parse_args()
    if args.quick:
        args.rounds = 2
    if args.smoke:
        args.rounds, args.concurrency, args.adapters = 1, [2], 2

    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(args, directory))
    finish(args)


if __name__ == "__main__":
    main()
