"""``any-agent demo``: train a small model on agents' calls."""

from __future__ import annotations

import argparse
from functools import partial

from any_agent.runtime.command_line import count, option, require_installed

_count = count(10**9)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="create a tiny model, serve it, and train it on what agents do; downloads nothing",
    )
    add = partial(option, demo)
    add(
        "--model NAME",
        "tiny: a model that is created by code (default); smollm2: a pretrained one of 135 M "
        "parameters, which learns sums up to 20",
        choices=("tiny", "smollm2"),
        default="tiny",
    )
    add("--seed N", "seed of the model and the prompts (default 0)", type=int, default=0)
    add("--steps N", "number of optimizer steps (default 25)", type=_count)
    add(
        "--ranks N",
        "number of engines, each with a proxy (default 2; 1 with smollm2)",
        type=_count,
    )
    add("--json FILE", "write the figures to this file")
    add("--keep DIR", "keep the run's files here (default: a new folder)")
    add(
        "--permute-rewards",
        "control experiment: give each session another session's rewards, so that nothing can be "
        "learned",
    )
    demo.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    require_installed("train")
    from any_agent.demo.run import run_demo

    return run_demo(
        model=arguments.model,
        seed=arguments.seed,
        steps=arguments.steps,
        ranks=arguments.ranks,
        json_path=arguments.json,
        keep=arguments.keep,
        permute=arguments.permute_rewards,
    )
