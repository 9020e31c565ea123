"""`any-agent demo`: a tiny model learns from agents that know only a URL and a key."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from any_agent.client import RLClient
from any_agent.config import Config, load_config
from any_agent.demo.driver import DISCOUNT, GROUP_SIZE, Driver, workers
from any_agent.demo.memory import PeakMemory
from any_agent.errors import AnyAgentError, ConfigError, StartupError
from any_agent.launcher import Node
from any_agent.launcher.progress import Progress

STEPS = 25
WORKERS = 4
EXPERIMENT = "demo"


def run_demo(
    *,
    seed: int,
    steps: int | None = None,
    json_path: str | None = None,
    keep: str | None = None,
    permute: bool = False,
) -> int:
    """Run it, print it, write the figures; 0 when it went well."""
    started = time.monotonic()
    root = _folder(keep)
    print(f"demo     seed {seed}, files in {root}", flush=True)
    print("model    being made and warmed up on noisy labels", flush=True)
    config = demo_config(root, seed=seed, steps=STEPS if steps is None else steps)
    with PeakMemory() as memory:
        _make_model(Path(config.model.path), seed)
        with Node(config) as node:
            try:
                figures = asyncio.run(_drive(node, config, seed=seed, permute=permute))
            except* AnyAgentError as group:
                raise _first(group) from None
            _finish(node)
        peak = memory.peak_mib
    figures |= {
        "seed": seed,
        "steps": config.train.steps,
        "seconds": round(time.monotonic() - started, 1),
        "peak_memory_mib": round(peak),
        "permuted_rewards": permute,
        "run": str(node.dir.path),
    }
    _print_end(figures, config)
    if json_path:
        Path(json_path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


def _folder(keep: str | None) -> Path:
    """An empty folder for the demo's files."""
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="any-agent-demo-"))
    root = Path(keep).absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise ConfigError(f"{root} is not empty; choose another folder for --keep")
    except OSError as error:
        raise ConfigError(f"--keep {root} cannot be used: {error.strerror}") from None
    return root


def demo_config(root: Path, *, seed: int, steps: int) -> Config:
    """The demo's settings; everything else is a default."""
    settings = {
        "root": root / "runs",
        "experiment": EXPERIMENT,
        "trial": f"seed-{seed}",
        "model.path": root / "model",
        "model.enable_thinking": "false",
        "server.port": 0,
        "log_level": "info",
        "sampling.max_new_tokens": 4,
        "sessions.group_size": GROUP_SIZE,
        "rollout.batch_size": 64,
        "rollout.max_concurrent": 192,
        "rollout.eta": 2,
        "train.steps": steps,
        "train.seed": seed,
        "train.discount": DISCOUNT,
        "train.lr": 1.5e-3,
        "train.betas": "[0.9, 0.95]",
        "train.checkpoint_every": 20,
    }
    return load_config(None, [f"{key}={value}" for key, value in settings.items()], environ={})


def _make_model(path: Path, seed: int) -> None:
    """In a process of its own: this one never imports torch."""
    command = [sys.executable, "-m", "any_agent.demo.model", str(path), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise StartupError(f"the demo's model could not be made:\n{done.stderr[-2000:]}")


def _first(error: BaseException) -> BaseException:
    """What went wrong first, out of nested groups of concurrent tasks."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _drive(node: Node, config: Config, *, seed: int, permute: bool) -> dict[str, Any]:
    async with RLClient(node.url) as client, workers(WORKERS) as agents:
        driver = Driver(client, agents, seed=seed, permute=permute)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(_watch(node))
            before = await driver.evaluate()
            print(f"before   first answer right: {before.first_accuracy:.3f}", flush=True)
            shown = Progress(node.dir.metrics, config.train.steps)
            progress = tasks.create_task(_show(shown, config.train.steps))
            training = await driver.train()
            await asyncio.wait([progress], timeout=2)
            progress.cancel()
            after = await driver.evaluate()
            print(f"after    first answer right: {after.first_accuracy:.3f}", flush=True)
            watching.cancel()
    return {
        "before": before.first_accuracy,
        "after": after.first_accuracy,
        "eval_sessions": before.sessions + after.sessions,
        "train_sessions": training.sessions,
        "failed_sessions": before.failed + training.failed + after.failed,
        "errors": [*before.errors, *training.errors, *after.errors],
    }


async def _watch(node: Node) -> None:
    """Raise when a part of the service dies."""
    while True:
        # Not in another thread: children end with the thread that started them.
        node.check()
        await asyncio.sleep(0.5)


async def _show(progress: Progress, steps: int) -> None:
    while progress.step < steps:
        for line in await asyncio.to_thread(progress.new_lines):
            print(line, flush=True)
        await asyncio.sleep(0.5)


def _finish(node: Node) -> None:
    """The trainer tells `finished` before it exits; let it."""
    deadline = time.monotonic() + 30
    while not node.check() and time.monotonic() < deadline:
        time.sleep(0.05)


def _print_end(figures: dict[str, Any], config: Config) -> None:
    print(
        f"done     {figures['before']:.3f} -> {figures['after']:.3f} in {figures['steps']} steps, "
        f"{figures['seconds']} s, peak memory {figures['peak_memory_mib']} MiB"
    )
    if figures["failed_sessions"]:
        print(f"         {figures['failed_sessions']} sessions failed: {figures['errors'][-1]}")
    print(f"kept     {figures['run']}/checkpoints")
    print(
        f"next     {_command()} serve --no-train "
        f"--experiment {config.experiment} --trial {config.trial} root={config.root}"
    )


def _command() -> str:
    """How this program is called from here."""
    if shutil.which("any-agent"):
        return "any-agent"
    beside = Path(sys.executable).with_name("any-agent")
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)
