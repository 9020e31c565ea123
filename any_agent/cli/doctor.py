"""``any-agent doctor``: its arguments; `any_agent.doctor.run` runs the checks."""

from __future__ import annotations

import argparse
from functools import partial

from any_agent.cli.operator_client import KEY_HELP
from any_agent.runtime.command_line import add_setting_arguments, option, require_installed

_DESCRIPTION = """\
Check the laws that exact training depends on, for a model and its chat template, for the engines
that serve it, or for a running service, and report where they fail.
"""
_EPILOG = f"""\
MODEL is a folder or a hub name. Without it, the model and the engines are those of the trial that
--config, --experiment and --trial name. Each engine samples a few hundred tokens. On a service the
checks open sessions of mode eval and abort them at the end: training never sees them.

The key is an operator's or a tenant's. {KEY_HELP}

Exit codes: 0 no law is broken, 1 a law is broken, 2 wrong input.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check the laws of exact training for a model, an engine or a running service",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = partial(option, parser)
    add("--engine URL", "an engine of the model (repeatable)", action="append")
    add("--url URL", "a running service: its router or one rank")
    add("--key KEY", "the service's key; safer in the environment")
    add("--renderer NAME", "short for model.renderer=NAME")
    add("--quick", "run only the checks without an engine (two seconds)")
    add("--json", "print JSON")
    add_setting_arguments(
        parser,
        ("experiment", "trial"),
        metavar="MODEL | key=value",
        help="the model to check; any setting, e.g. model.enable_thinking=false",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    require_installed("serve")
    from any_agent.doctor.run import run

    return run(arguments)
