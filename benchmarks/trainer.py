"""The trainer's optimizer step beside other ways to make it: ``python benchmarks/trainer.py``.

Each contender makes the same step on the same rows, with one thread, in a process of its own:

- ``any-agent``: `Policy.train` with the default settings, a row for each turn; and the same with
  ``train.dtype=bfloat16``, with ``train.offload_optimizer``, and in two processes, among which
  weights are divided;
- ``bucketed rows``: a row for each turn, those of like length padded together, plain transformers;
- ``concatenated``: the same, a row for each path from a session's start to a last turn;
- ``TRL, rows`` and ``TRL, concatenated``: TRL's GRPOTrainer on these rows, with its own padding,
  its pass for the importance weights, and its loss.

The peers' size of a pass is swept on a part of the rows; the best is kept. CPU is that of the step
alone (user and system), memory the process's peak; of two processes they are the sums. Each loss
and gradient norm is compared with ours, but for bfloat16's, whose digits are fewer. Ours say how
many tokens they computed for each distinct one.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch

from any_agent.config import TrainConfig
from any_agent.runtime.ports import free_port
from benchmarks.common import finish, machine, median, parser, ratio
from benchmarks.peers.training import Bucketed, FullLogits, Peer, Step, Trl
from benchmarks.training_rows import (
    WORKLOADS,
    TrainingRows,
    Workload,
    length,
    make_model,
    make_rows,
)
from trainer.command_channel import Leader
from trainer.from_config import loss_config, policy_config
from trainer.parallel.trainer_group import Follower
from trainer.policy import Policy
from trainer.rows import Row
from trainer.world import World, join

OURS = "any-agent"
OTHER_WAYS: dict[str, dict[str, Any]] = {
    "ours, bfloat16": {"dtype": "bfloat16"},
    "ours, offload": {"offload_optimizer": True},
    "ours, 2 processes": {"processes": 2},
}
"""The settings of other ways to make our step."""
PEERS = {
    "bucketed rows": "rows",
    "concatenated": "paths",
    "TRL, rows": "rows",
    "TRL, concatenated": "paths",
}
"""The form of the rows that each peer gets."""
SIZES = (768, 1024, 1536, 3072, 6144)
"""The padded tokens of a pass that are tried for each peer."""
SAMPLE = 6144
"""The tokens of the rows that they are tried on, at least."""
LR = 1e-12
"""A rate that changes no float32 weight, so that every round has the same loss."""
SAME = 1e-4
"""The bound of a difference in loss, or in the gradient's norm relative to ours."""
HEAD_MEMORY = 14e9
"""The free bytes without which full logits of a large vocabulary are not tried."""


# --------------------------------------------------------------------- one contender's process


def _work(send: Connection, told: dict[str, Any]) -> None:
    send.send(work(told))


def work(told: dict[str, Any]) -> dict[str, Any]:
    """Make one contender's steps in this process, and return what they took."""
    resource.setrlimit(resource.RLIMIT_CPU, (told["seconds"], told["seconds"] + 5))
    torch.set_num_threads(1)
    workload = _workload(told)
    model = make_model(workload.model)
    made = make_rows(workload, model.config.vocab_size)
    rows = made.paths if PEERS.get(told["contender"]) == "paths" else made.rows
    settings = OTHER_WAYS.get(told["contender"], {})
    processes, policy = [psutil.Process()], None
    if settings or told["contender"] == OURS:
        step, policy = _ours(model, settings, processes)
    else:
        peer = _peer(told["contender"], model)
        if "sizes" in told:
            return _swept(peer, rows, told["sizes"], told["sample"])
        peer.size = told["size"]
        step = peer.step
    # The first step makes the optimizer's state.
    step(_warm_up(rows))
    before = _memory("VmRSS", processes)
    seconds = []
    for _ in range(told["rounds"]):
        gc.collect()
        began = _cpu(processes)
        done = step(rows)
        seconds.append(_cpu(processes) - began)
    peak = _memory("VmHWM", processes)
    if policy is not None and policy.leader is not None:
        policy.leader.stop()
    return {
        "cpu": median(seconds),
        "peak": peak,
        "added": peak - before,
        "loss": done.loss,
        "norm": done.norm,
        "computed": done.computed / made.distinct,
        "tokens": _tokens(made),
    }


def _workload(told: dict[str, Any]) -> Workload:
    workload = WORKLOADS[told["workload"]]
    return workload.smallest() if told["smoke"] else workload


def _warm_up(rows: Sequence[Row]) -> list[Row]:
    """Return a few tokens of a row, some of them trained on."""
    first = int(rows[0]["loss_mask"].argmax())
    part = slice(max(0, first - 8), first + 4)
    return [{key: value[part] if value.ndim else value for key, value in rows[0].items()}]


def _ours(
    model: Any, settings: dict[str, Any], processes: list[psutil.Process]
) -> tuple[Callable[[Sequence[Row]], Step], Policy]:
    """Return our step, and its policy; processes that share in it are added to ``processes``."""
    config = TrainConfig(device="cpu", lr=LR, **settings)
    world = _joined(model, config, processes)
    leader = Leader(world) if world is not None else None
    policy = Policy(model, policy_config(config), world)
    policy.leader = leader

    def step(rows: Sequence[Row]) -> Step:
        done = policy.train(rows, config.micro_batch_tokens, loss_config(config))
        return Step(done.stats.loss, done.grad_norm, done.stats.tokens_computed)

    return step, policy


def _joined(model: Any, config: TrainConfig, processes: list[psutil.Process]) -> World | None:
    """Return this process's place among those that the config asks for, which it starts."""
    if config.processes == 1:
        return None
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    os.environ |= {"WORLD_SIZE": str(config.processes), "LOCAL_WORLD_SIZE": str(config.processes)}
    fork = multiprocessing.get_context("fork")
    for rank in range(1, config.processes):
        follower = fork.Process(target=_follow, args=(model, config, rank), daemon=True)
        follower.start()
        processes.append(psutil.Process(follower.pid))
    os.environ["RANK"] = "0"
    return join("cpu")


def _follow(model: Any, config: TrainConfig, rank: int) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    world = join("cpu")
    follower = Follower(world, policy_config(config), config)
    follower.policy = Policy(model, policy_config(config), world)
    follower.follow()


def _peer(name: str, model: Any) -> Peer:
    kinds = {"full logits": FullLogits, "TRL, rows": Trl, "TRL, concatenated": Trl}
    return kinds.get(name, Bucketed)(model, LR)


def _tokens(made: TrainingRows) -> dict[str, int]:
    return {
        "rows": sum(map(length, made.rows)),
        "paths": sum(map(length, made.paths)),
        "distinct": made.distinct,
        "trained": sum(int(row["loss_mask"].sum()) for row in made.rows),
    }


def _swept(
    peer: Peer, rows: Sequence[Row], sizes: Sequence[int], enough: int
) -> dict[str, dict[str, float]]:
    """Return by size the CPU of a sample's passes, and what it makes of all rows."""
    sample = _sample(sorted(rows, key=length, reverse=True), enough)
    peer.size = sizes[0]
    peer.step(_warm_up(rows))
    out: dict[str, dict[str, float]] = {}
    known = []
    for size in sizes:
        peer.size = size
        passes = peer.passes(sample)
        if passes in known:
            continue
        known.append(passes)
        began = time.process_time()
        for loss in peer.losses(sample):
            loss.backward()
        peer.optimizer.zero_grad(set_to_none=True)
        cpu = time.process_time() - began
        whole = cpu * sum(peer.passes(rows)) / sum(passes)
        out[str(size)] = {"cpu": cpu, "whole": whole}
    return out


def _sample(rows: Sequence[Row], enough: int) -> list[Row]:
    """Return evenly spaced rows, the first among them, that have ``enough`` tokens together."""
    count = 1
    while True:
        sample = [rows[k * len(rows) // count] for k in range(count)]
        if count == len(rows) or sum(map(length, sample)) >= enough:
            return sample
        count += 1


def _cpu(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds of this process, the first one, and of those beside it."""
    others = (one.cpu_times() for one in processes[1:])
    return time.process_time() + sum(one.user + one.system for one in others)


def _memory(name: str, processes: Sequence[psutil.Process]) -> int:
    """Return the processes' resident bytes, as ``VmRSS`` or at their peaks as ``VmHWM``."""
    try:
        texts = [Path(f"/proc/{one.pid}/status").read_text() for one in processes]
    except FileNotFoundError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS: bytes
        return peak if name == "VmHWM" else sum(one.memory_info().rss for one in processes)
    lines = (line for text in texts for line in text.splitlines() if line.startswith(name))
    return sum(1024 * int(line.split()[1]) for line in lines)


# ------------------------------------------------------------------------------- the contenders


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings of this run."""

    smoke: bool
    rounds: int
    limit: int
    sizes: tuple[int, ...]
    sample: int
    other_ways: tuple[str, ...] = ()

    def run(self, contender: str, workload: str, **told: Any) -> dict[str, Any] | None:
        """Return the figures of one process; None if it reached the limit of CPU seconds."""
        # Making the model takes its time, too.
        seconds = self.limit * self.rounds + 60
        told |= {"contender": contender, "workload": workload, "seconds": seconds}
        told |= {"smoke": self.smoke, "rounds": self.rounds}
        # Forked, so that the imports are made once.
        fork = multiprocessing.get_context("fork")
        receive, send = fork.Pipe(duplex=False)
        process = fork.Process(target=_work, args=(send, told))
        process.start()
        send.close()
        try:
            return dict(receive.recv())
        except EOFError:
            process.join()
            if process.exitcode == -signal.SIGXCPU:
                return None
            raise RuntimeError(f"{contender} on {workload}: exit code {process.exitcode}") from None
        finally:
            process.join()

    def best(self, peer: str, workload: str) -> tuple[int, float]:
        """Return the best size of a pass, and the CPU seconds that its sample predicts."""
        found = self.run(peer, workload, sizes=self.sizes, sample=self.sample)
        if found is None:
            return self.sizes[0], float("inf")
        size = min(found, key=lambda size: found[size]["cpu"])
        return int(size), found[size]["whole"]


@dataclass(frozen=True, slots=True)
class Result:
    """One contender's figures, or the reason why it has none."""

    figures: dict[str, Any] | None
    size: int | None = None
    why: str = ""


def compare(bench: Bench, name: str, about: str, peers: Sequence[str]) -> dict[str, Result]:
    """Measure and print one workload; return the results by contender."""
    out = {
        ours: Result(bench.run(ours, name), why=f"over {bench.limit} s")
        for ours in (OURS, *bench.other_ways)
    }
    for peer in peers:
        size, predicted = bench.best(peer, name)
        if predicted > bench.limit:
            out[peer] = Result(None, size, f"about {predicted:.0f} s by the sample, not run")
        else:
            figures = bench.run(peer, name, size=size)
            out[peer] = Result(figures, size, f"over {bench.limit} s")
    show(name, about, out)
    return out


def show(name: str, about: str, results: dict[str, Result]) -> None:
    """Print one workload's table, and record its ratios."""
    print(f"\n{name}: {about}")
    tokens = next((r.figures["tokens"] for r in results.values() if r.figures), None)
    if tokens is not None:
        print(
            "tokens: {rows} in rows of a turn, {paths} concatenated, {distinct} distinct "
            "({share:.2f} of concatenated), {trained} trained".format(
                **tokens, share=tokens["distinct"] / tokens["paths"]
            )
        )
    print(
        f"{'':19}{'CPU s':>8}{'ours/it':>9}{'peak GB':>9}{'ours/it':>9}{'a pass':>8}"
        f"{'loss':>11}{'- ours':>10}{'gradient':>11}{'/ ours - 1':>12}{'computed':>10}"
    )
    ours = results[OURS].figures
    for contender, result in results.items():
        it = result.figures
        if it is None:
            print(f"{contender:19}{result.why}")
            continue
        line = f"{contender:19}{it['cpu']:8.1f}{_over(ours, it, 'cpu'):>9}"
        line += f"{it['peak'] / 1e9:9.2f}{_over(ours, it, 'peak'):>9}"
        line += f"{result.size or 'default':>8}{it['loss']:11.6f}"
        if ours is None:
            print(f"{line}{'':10}{it['norm']:11.6f}")
            continue
        line += f"{it['loss'] - ours['loss']:10.1e}{it['norm']:11.6f}"
        own = contender in (OURS, *OTHER_WAYS)
        computed = f"{it['computed']:10.3f}" if own else ""
        print(f"{line}{it['norm'] / ours['norm'] - 1:12.1e}{computed}", flush=True)
        if contender in OTHER_WAYS:
            ratio(f"{name} {contender}, tokens computed / distinct", it["computed"], 1.0)
            if "dtype" in OTHER_WAYS[contender]:
                continue
        elif contender != OURS:
            ratio(f"{name} / {contender}", ours["cpu"], it["cpu"])
        if abs(it["loss"] - ours["loss"]) > SAME or abs(it["norm"] / ours["norm"] - 1) > SAME:
            raise RuntimeError(f"{name}: {contender} makes another step than {OURS}")


def _over(ours: dict[str, Any] | None, it: dict[str, Any], what: str) -> str:
    return f"{ours[what] / it[what]:.2f}" if ours is not None else "-"


def growth(found: dict[str, dict[str, Result]]) -> None:
    """Print the CPU seconds of one episode by its number of turns."""
    print(f"\n{'CPU s by turns':19}" + "".join(f"{name.split('/')[1]:>8}" for name in found))
    for contender in next(iter(found.values())):
        each = (results[contender].figures for results in found.values())
        cells = (f"{it['cpu']:8.1f}" if it else f"{'-':>8}" for it in each)
        print(f"{contender:19}" + "".join(cells))


def head(bench: Bench) -> None:
    """Print the memory of a large vocabulary's log-probabilities, ours against full logits."""
    free = psutil.virtual_memory().available
    if not bench.smoke and free < HEAD_MEMORY:
        print(f"\nhead: needs {HEAD_MEMORY / 1e9:.0f} GB of free memory, {free / 1e9:.0f} GB are")
        return
    ours = bench.run(OURS, "head")
    peer = bench.run("full logits", "head", size=1)
    if ours is None or peer is None:
        print("\nhead: over the limit")
        return
    print("\nhead: one row of {rows} tokens, {trained} trained".format(**ours["tokens"]))
    print(f"{'':19}{'added GB':>9}{'ours/it':>9}{'CPU s':>8}{'loss - ours':>13}")
    for contender, it in ((OURS, ours), ("full logits", peer)):
        print(
            f"{contender:19}{it['added'] / 1e9:9.3f}{_over(ours, it, 'added'):>9}"
            f"{it['cpu']:8.1f}{it['loss'] - ours['loss']:13.1e}",
            flush=True,
        )
    ratio("head memory / full logits", ours["added"], peer["added"])


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--only", nargs="+", metavar="NAME", help="W1, W2, W3, W4, W5, head")
    flags.add_argument("--rounds", type=int, default=1, help="steps of each; medians are shown")
    flags.add_argument(
        "--limit", type=int, default=400, help="leave out what takes more CPU seconds a step"
    )
    flags.add_argument("--against", nargs="*", choices=PEERS, default=list(PEERS), metavar="NAME")
    flags.add_argument(
        "--also", nargs="*", choices=OTHER_WAYS, default=list(OTHER_WAYS), metavar="NAME"
    )
    flags.add_argument(
        "--sizes", nargs="+", type=int, default=SIZES, help="padded tokens of a pass to be tried"
    )
    args = flags.parse_args()
    bench = Bench(args.smoke, args.rounds, args.limit, tuple(args.sizes), SAMPLE, tuple(args.also))
    wanted = args.only or ("W1 W3 head" if args.quick else "W1 W2 W3 W4 W5 head").split()
    if args.smoke:
        bench = replace(bench, sizes=(32, 64), sample=64)
        wanted = args.only or ["W2", "head"]
        importlib.import_module("trl.trainer.grpo_trainer")
    # Imports the models' classes before the processes are forked, too.
    make_model("tiny")
    if unknown := set(wanted) - {name.split("/")[0] for name in WORKLOADS}:
        flags.error(f"no workload is called {', '.join(sorted(unknown))}")
    print(f"{machine()}; one thread; {args.rounds} rounds")
    for name in wanted:
        if name == "head":
            head(bench)
            continue
        found = {}
        for key, workload in WORKLOADS.items():
            if key.split("/")[0] != name:
                continue
            single = len(workload.parents) == 1
            peers = [peer for peer in args.against if not (single and PEERS[peer] == "paths")]
            found[key] = compare(bench, key, workload.about, peers)
        if len(found) > 1:
            growth(found)
    finish(args)


if __name__ == "__main__":
    main()
