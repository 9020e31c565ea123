"""One contender's step for `benchmarks/trainer.py`, made and measured in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from any_agent.config import TrainConfig
from any_agent.runtime.ports import free_port
from benchmarks.peers.training import Bucketed, FullLogits, Peer, Step, Trl
from benchmarks.training_rows import TrainingRows, length, make_model, make_rows
from trainer.command_channel import Leader
from trainer.from_config import loss_config, policy_config
from trainer.parallel.trainer_group import Follower
from trainer.policy import Policy
from trainer.rows import Row
from trainer.world import World, join

OURS: dict[str, dict[str, Any]] = {
    "any-agent": {},
    "ours, bfloat16": {"dtype": "bfloat16"},
    "ours, offload": {"offload_optimizer": True},
    "ours, 2 processes": {"processes": 2},
}
"""The settings of each way to make our step."""
PEERS = {
    "bucketed rows": "rows",
    "concatenated": "paths",
    "TRL, rows": "rows",
    "TRL, concatenated": "paths",
}
"""The form of the rows that each peer gets."""
LR = 1e-12
"""A rate that changes no float32 weight, so that every round has the same loss."""


def work(send: Connection, told: dict[str, Any]) -> None:
    """Send what :func:`_measured` returns."""
    send.send(_measured(told))


def _measured(told: dict[str, Any]) -> dict[str, Any]:
    """Make one contender's steps in this process, and return what they took."""
    resource.setrlimit(resource.RLIMIT_CPU, (told["seconds"], told["seconds"] + 5))
    torch.set_num_threads(1)
    workload = told["workload"]
    model = make_model(workload.model)
    made = make_rows(workload, model.config.vocab_size)
    rows = made.paths if PEERS.get(told["contender"]) == "paths" else made.rows
    processes, policy = [psutil.Process()], None
    if told["contender"] in OURS:
        step, policy = _ours(model, OURS[told["contender"]], processes)
    else:
        peer = _peer(told["contender"], model)
        if "sizes" in told:
            return _swept(peer, rows, told["sizes"], told["sample"])
        peer.size = told["size"]
        step = peer.step
    # The first step makes the optimizer's state.
    step(_warm_up(rows))
    before = _memory("VmRSS", processes)
    seconds: list[float] = []
    while len(seconds) < told["rounds"] and sum(seconds) < told["enough"]:
        gc.collect()
        began = _cpu(processes)
        done = step(rows)
        seconds.append(_cpu(processes) - began)
    peak = _memory("VmHWM", processes)
    if policy is not None and policy.leader is not None:
        policy.leader.stop()
    return {
        "cpu": min(seconds),
        "peak": peak,
        "added": peak - before,
        "loss": done.loss,
        "norm": done.norm,
        "computed": done.computed / made.distinct,
        "tokens": _tokens(made),
    }


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
