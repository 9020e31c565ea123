"""New weights from a trainer to two embedded engines: ``python benchmarks/weights.py``.

A random model on the CPU (``--parameters``), its trainer in this process, two engines in processes
of their own. The cost of each way is compared with its lower bound, in the same rounds:

- by the folder: writing the safetensors once (as `save_pretrained` does, without the trainer's
  fsync), and loading them in both engines, side by side;
- by a process group: a plain gloo broadcast of the same bytes, in the same tensors, to two
  processes that do nothing else, and the engines' loading.

A way's own time includes everything else: the pauses, the sessions, the checksums of every tensor
in trainer and engines. Agents see the pause, from the proxy's pause to its resumption, here without
a proxy. Figures are medians of ``--rounds``; CPU seconds are of all threads, per 10^9 bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    child,
    cpu_seconds,
    finish,
    machine,
    median,
    parser,
    ratio,
    wait_until_up,
)

BUCKET = 256 * 2**20
LIMIT = 600.0


def make_model(folder: Path, parameters: int) -> Path:
    """Make a random Qwen3 of about ``parameters`` parameters, with the demo's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from any_agent.demo.models.tiny import save_tiny_model

    tiny = save_tiny_model(folder / "tiny", seed=0)
    config = AutoConfig.from_pretrained(tiny)
    wide = parameters >= 10**8
    config.hidden_size, config.intermediate_size = (1024, 3072) if wide else (256, 768)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 4, 64
    # Attention's four matrices, two of them of half the heads, and the MLP's three.
    each = config.hidden_size * (8 * 64 * 3 + 3 * config.intermediate_size)
    config.num_hidden_layers = max(1, round(parameters / each))
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "model")
    return folder / "model"


class Proxy:
    """A gate that pauses and resumes the engine, and takes the time in between."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.version = 0
        self.pauses: list[float] = []

    async def pause(self, *, ttl: float) -> None:
        self._began = time.perf_counter()
        await post(self.url, "/pause_generation", {"mode": "abort"})

    async def resume(self) -> None:
        await post(self.url, "/continue_generation", {})
        self.pauses.append(time.perf_counter() - self._began)

    async def publish_version(self, *, version: int, path: str, step: int) -> None:
        self.version = version

    async def run_info(self) -> Any:
        return SimpleNamespace(version=self.version)


async def post(url: str, path: str, body: dict[str, Any]) -> None:
    import httpx

    async with httpx.AsyncClient(timeout=LIMIT, trust_env=False) as http:
        answer = await http.post(url + path, json=body)
    assert answer.status_code == 200, answer.text


def fleet(proxies: list[Proxy]) -> Any:
    from any_agent.rollout import RankClients
    from any_agent.rundir.fleet import FleetFile
    from any_agent.rundir.registry import RegistryEntry

    class Fleet(RankClients):
        def __init__(self) -> None:
            self.clients: Any = dict(enumerate(proxies))
            self._fleet = FleetFile(None, len(proxies))

        def entry(self, rank: int) -> RegistryEntry | None:
            return RegistryEntry(
                name=f"rank-{rank}", boot_id="b", url="u", pid=1, engine_url=proxies[rank].url
            )

    return Fleet()


@contextmanager
def engine(model: Path, folder: Path, name: str) -> Iterator[tuple[str, int]]:
    from any_agent.runtime.ports import reserve

    with reserve("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        log = folder / f"{name}.log"
        command = ["-m", "any_agent.engine.embedded", "--model-path", str(model)]
        with child([*command, "--port", str(port), "--device", "cpu"], log) as process:
            url = f"http://127.0.0.1:{port}"
            wait_until_up(process, f"{url}/health", log)
            yield url, process.pid


class Bench:
    """One trainer and its engines; each method is one round of one contender."""

    def __init__(self, model: Path, folder: Path, urls: list[str], call: Any) -> None:
        from trainer.model import PolicyConfig
        from trainer.policy import Policy
        from trainer.sync import NewWeights
        from trainer.sync.bucketed import BucketSync
        from trainer.sync.disk import DiskSync
        from trainer.sync.transports import GroupTransport
        from trainer.weight_folders import publish_to_disk

        self.policy = Policy.load(model, PolicyConfig(threads=1))
        self.bytes = sum(t.nbytes for bucket in self.buckets() for _, t in bucket)
        self._model, self.folder, self._urls, self._call = model, folder, urls, call
        self.proxies = [Proxy(url) for url in urls]
        self._ranks = fleet(self.proxies)
        self._version = 0
        self._publish, self._weights = publish_to_disk, NewWeights
        self.disk = DiskSync(call, load_timeout=LIMIT)
        self.group = BucketSync(
            call, GroupTransport(timeout=LIMIT), load_timeout=LIMIT, dtype="float32"
        )

    def buckets(self) -> Any:
        return self.policy.buckets(BUCKET)

    def write(self) -> None:
        """Measure the lower bound of the trainer's part: transformers writes the same files."""
        self.policy.model.save_pretrained(self.folder / "plain")

    def load(self) -> None:
        """Measure the lower bound of the engines' part, at once."""
        body = {"model_path": str(self.folder / "plain"), "weight_version": str(self._version)}

        async def both() -> None:
            posts = (post(url, "/update_weights_from_disk", body) for url in self._urls)
            await asyncio.gather(*posts)

        self._call(both(), timeout=LIMIT)

    def by(self, sync: Any) -> None:
        """Measure a whole update, as the trainer makes it."""
        from trainer.weight_folders import prune

        self._version += 1
        version, folder = self._version, self.folder / f"v{self._version:08d}"

        def write() -> None:
            self._publish(self.policy, self._model, self.folder, version)

        new = self._weights(version, version, folder, write, self.buckets)
        sync.prepare(new)
        sync.update(self._ranks, new)
        if folder.is_dir():
            prune(self.folder, 1)


@contextmanager
def broadcast(bench: Bench) -> Iterator[Callable[[], None]]:
    """The lower bound of a group: two processes that only receive."""
    from any_agent.engine.weight_process_group import Rendezvous, WeightGroup

    meeting = Rendezvous("127.0.0.1")
    layout = bench.folder / "layout.json"
    layout.write_text(
        json.dumps([[list(t.shape) for _, t in bucket] for bucket in bench.buckets()])
    )
    with ExitStack() as stack:
        for rank in (1, 2):
            command = [__file__, "--receive", f"{layout}:{meeting.port}:{rank}"]
            stack.enter_context(child(command, bench.folder / "receivers.log"))
        group = WeightGroup(meeting.store, rank=0, size=3, name="floor", timeout=LIMIT)
        stack.callback(group.close)

        def send() -> None:
            for bucket in bench.buckets():
                group.broadcast([tensor for _, tensor in bucket])

        yield send


def receive(told: str) -> None:
    """Receive as one of these two processes, until the group is closed."""
    import torch

    from any_agent.engine.weight_process_group import WeightGroup

    layout, port, rank = told.rsplit(":", 2)
    buckets = json.loads(Path(layout).read_text())
    group = WeightGroup.join(
        "127.0.0.1", int(port), rank=int(rank), size=3, name="floor", timeout=LIMIT
    )
    with suppress(RuntimeError):
        while True:
            for shapes in buckets:
                group.broadcast([torch.empty(shape) for shape in shapes])


def measured(rounds: int, contenders: dict[str, Callable[[], None]], pids: list[int]) -> Any:
    """Print medians of seconds, and CPU seconds of the trainer and an engine, by contender."""
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for name, run in contenders.items():
            mine, theirs = time.process_time(), [cpu_seconds(pid) for pid in pids]
            began = time.perf_counter()
            run()
            seconds[name]["wall"].append(time.perf_counter() - began)
            seconds[name]["trainer"].append(time.process_time() - mine)
            spent = [cpu_seconds(pid) - before for pid, before in zip(pids, theirs, strict=True)]
            seconds[name]["engine"].append(sum(spent) / len(spent))
    return {
        name: {what: median(values) for what, values in each.items()}
        for name, each in seconds.items()
    }


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--parameters", type=float, default=5e8)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--folder", help="folder for the weights; default: a temporary one")
    flags.add_argument("--receive", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.quick:
        args.parameters, args.rounds = 1e8, 2
    if args.smoke:
        args.parameters, args.rounds = 1e6, 1
    if args.receive:
        receive(args.receive)
        return
    from transformers.utils import logging as transformers_logging

    from any_agent.runtime.event_loop import LoopThread

    transformers_logging.disable_progress_bar()
    thread = LoopThread("ranks")
    thread.start()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.folder)))
        model = make_model(folder, int(args.parameters))
        engines = [stack.enter_context(engine(model, folder, f"engine-{k}")) for k in (0, 1)]
        bench = Bench(model, folder, [url for url, _ in engines], thread.call)
        send = stack.enter_context(broadcast(bench))
        contenders = {
            "write": bench.write,
            "load": bench.load,
            "disk": lambda: bench.by(bench.disk),
            "broadcast": send,
            "distributed": lambda: bench.by(bench.group),
        }
        found = measured(args.rounds, contenders, [pid for _, pid in engines])
        show(bench, found, args.rounds)
        bench.group.close()
    thread.stop()
    finish(args)


def show(bench: Bench, found: Any, rounds: int) -> None:
    size = bench.bytes / 1e9
    pauses = bench.proxies[0].pauses
    by_disk, by_group = pauses[0::2], pauses[1::2]
    print(f"{machine()}; {size:.2f} GB of float32 weights, two engines; {rounds} rounds")
    print(
        f"{'':12} {'seconds':>8} {'GB/s':>6} {'CPU s/GB trainer':>17} {'engine':>7} {'pause s':>8}"
    )
    for name, each in found.items():
        pause = {"disk": by_disk, "distributed": by_group}.get(name)
        print(
            f"{name:12} {each['wall']:8.2f} {size / each['wall']:6.2f} "
            f"{each['trainer'] / size:17.2f} {each['engine'] / size:7.2f} "
            f"{f'{median(pause):8.2f}' if pause else ''}"
        )
    wall = {name: each["wall"] for name, each in found.items()}
    floor = wall["write"] + wall["load"]
    ratio("disk / (write + load)", wall["disk"], floor)
    ratio("distributed / broadcast", wall["distributed"], wall["broadcast"])
    print(f"disk / (write + load)         {wall['disk'] / floor:.2f}")
    print(f"distributed / broadcast       {wall['distributed'] / wall['broadcast']:.2f}")
    allowed = wall["distributed"] - wall["load"]
    print(f"(distributed - load) / broadcast  {allowed / wall['broadcast']:.2f}")


if __name__ == "__main__":
    main()
