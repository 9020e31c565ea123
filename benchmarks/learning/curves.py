"""Draw learning curves of one agent, run by the trainer and outside of it.

``python benchmarks/learning/curves.py docs/explanation/dataset-and-proxy.png [--seeds N]``. Each
seed's model is trained twice, with the same settings: by a researcher's script on the dataset, and
by a service whose agents are outside and know its URL alone. Nothing is deterministic.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from any_agent.client.rl_client import RLClient
from any_agent.config import Config, load_config
from any_agent.data import DatasetCursor
from any_agent.errors import RunFinished
from any_agent.launcher import Node, NodeOptions
from any_agent.launcher.trial import trial_dir
from benchmarks.learning import tool_use
from benchmarks.learning.runs import ROOT, prepare, rewards_of, settings_of, train

TASK = "tool_use"
STEPS = 20
LEARNING_RATE = 4e-4
"""Slower than need be, so that there is a curve to see."""
LAST = 5
"""Steps over which the end of a curve is averaged."""
_AGENTS = 128
_LIMIT = 3600.0


def proxy_fed(folder: Path, seed: int, **more: Any) -> list[float]:
    """The rewards of a service's steps, whose agents this process runs."""
    settings = settings_of(folder, TASK, seed, **more)
    config = load_config(None, settings, environ={})
    with Node(config, NodeOptions(say=lambda _: None)) as node:
        asyncio.run(_drive(node, config))
    return rewards_of(trial_dir(config).metrics)


async def _drive(node: Node, config: Config) -> None:
    """Agents outside, which take the tasks in the order of the dataset-fed run."""
    jobs = _jobs(config)
    limits = httpx.Limits(max_connections=None)
    async with (
        asyncio.timeout(_LIMIT),
        RLClient(node.url) as service,
        httpx.AsyncClient(timeout=60, limits=limits) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for _ in range(_AGENTS):
            tasks.create_task(_work(service, http, jobs, config.sessions.group_size))
        while not node.check():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _jobs(config: Config) -> Iterator[tuple[int, dict[str, Any]]]:
    """Positions and items, as often each as a group is large."""
    items = tool_use.items("train")
    for position, index in DatasetCursor(len(items), seed=config.train.seed, shuffle=True):
        for _ in range(config.sessions.group_size):
            yield position, items[index]


async def _work(
    service: RLClient,
    http: httpx.AsyncClient,
    jobs: Iterator[tuple[int, dict[str, Any]]],
    group_size: int,
) -> None:
    agent = tool_use.PriceAgent()
    for position, item in jobs:
        try:
            session = await service.start_session(
                task_id=item["task_id"],
                group_id=f"g{position}",
                group_size=group_size,
                wait=20,
                patience=_LIMIT,
            )
        except RunFinished:
            return
        reward = await agent.run(
            item, base_url=session.base_url, api_key=session.api_key, http_client=http
        )
        await service.finalize(session.api_key, reward)


def picture(
    curves: dict[str, list[list[float]]],
    *,
    every: int = 1,
    first: int = 1,
    title: str = "One agent with a tool, its tasks from a dataset or from outside",
    reward: str = "mean reward of the step's sessions",
) -> Figure:
    """Draw every seed's curve thin, and the mean of each kind thick.

    A curve has a point for every ``every`` optimizer steps, from step ``first`` on.
    """
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colors = ("tab:blue", "tab:orange", "tab:green")
    for (name, runs), color in zip(curves.items(), colors, strict=False):
        steps = range(first, first + every * len(runs[0]), every)
        for rewards in runs:
            axes.plot(steps, rewards, color=color, linewidth=0.8, alpha=0.45)
        means = [statistics.fmean(at) for at in zip(*runs, strict=True)]
        axes.plot(steps, means, color=color, linewidth=2.5, label=f"{name}, mean of {len(runs)}")
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(reward)
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def summary(name: str, runs: list[list[float]], last: int = LAST) -> str:
    """Return where its curves end: mean and standard error over the seeds."""
    ends = [statistics.fmean(rewards[-last:]) for rewards in runs]
    error = statistics.stdev(ends) / len(ends) ** 0.5 if len(ends) > 1 else float("nan")
    return f"{name:<12} last {last} steps {statistics.fmean(ends):.3f} +- {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw dataset-fed and proxy-fed curves.")
    parser.add_argument("png", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    curves: dict[str, list[list[float]]] = {"dataset-fed": [], "proxy-fed": []}
    more: dict[str, Any] = {"train__steps": STEPS, "train__lr": LEARNING_RATE}
    more |= {"eval__every": 0, "eval__at_start": "false"}
    with tempfile.TemporaryDirectory(prefix="any-agent-curves-") as root:
        for seed in range(arguments.seeds):
            folder, again = Path(root, f"{seed}"), Path(root, f"{seed}-again")
            prepare(folder, TASK, seed)
            shutil.copytree(folder, again)
            curves["dataset-fed"].append(train(folder, TASK, seed, **more).rewards)
            curves["proxy-fed"].append(proxy_fed(again, seed, **more))
            for name, runs in curves.items():
                print(seed, name, " ".join(f"{reward:.2f}" for reward in runs[-1]), flush=True)
    for name, runs in curves.items():
        print(summary(name, runs))
    picture(curves).savefig(arguments.png)


if __name__ == "__main__":
    main()
