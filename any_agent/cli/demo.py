"""``any-agent demo``: train a tiny model on agents' calls, without a download."""

from __future__ import annotations

import argparse

from any_agent.runtime.command_line import count

_count = count(10**9)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the parser of ``demo``."""
    demo = commands.add_parser(
        "demo",
        help="create a tiny model, serve it, and train it on what agents do; downloads nothing",
    )
    add = demo.add_argument
    add("--seed", type=int, default=0, help="seed of the model and the prompts (default 0)")
    add("--steps", type=_count, help="number of optimizer steps (default 25)")
    add("--ranks", type=_count, help="number of engines, each with a proxy (default 2)")
    add("--json", metavar="FILE", help="write the figures to this file")
    add("--keep", metavar="DIR", help="keep the run's files here (default: a new folder)")
    add(
        "--permute-rewards",
        action="store_true",
        help="control experiment: give each session another session's rewards, so that nothing can "
        "be learned",
    )
    demo.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from any_agent.demo.run import run_demo

    return run_demo(
        seed=arguments.seed,
        steps=arguments.steps,
        ranks=arguments.ranks,
        json_path=arguments.json,
        keep=arguments.keep,
        permute=arguments.permute_rewards,
    )
