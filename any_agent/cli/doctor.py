"""The arguments of ``any-agent doctor``; `any_agent.doctor.run` does what they ask for."""

from __future__ import annotations

import argparse

_DESCRIPTION = """\
Prove the laws that exact training stands on, for a model and its chat template, for the engines
that serve it, or for a running service, and say where they fail.
"""
_EPILOG = """\
MODEL is a folder or a hub name. Without it, the trial that --config, --experiment and --trial name
says which model and engines are meant. Engines are asked to sample a few hundred tokens. A service
gets sessions of mode eval, which are aborted at the end: training sees nothing of it.

The key is that of an operator or a tenant: --key, or in the environment ANY_AGENT_KEY or
ANY_AGENT_SERVER__ADMIN_KEY.

Exit codes: 0 no law is broken, 1 some law is, 2 wrong input.
"""


def add_doctor_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The parser of ``doctor``."""
    parser = commands.add_parser(
        "doctor",
        help="prove the laws of exact training for a model, an engine or a running service",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--engine", action="append", metavar="URL", help="an engine of the model (repeatable)")
    add("--url", metavar="URL", help="a running service, the router's or a rank's own")
    add("--key", metavar="KEY", help="the service's; better in the environment")
    add("--renderer", metavar="NAME", help="short for model.renderer=NAME")
    add("--config", metavar="FILE", help="YAML settings")
    add("--experiment", metavar="NAME", help="short for experiment=NAME")
    add("--trial", metavar="NAME", help="short for trial=NAME")
    add("--quick", action="store_true", help="only what needs no engine: two seconds")
    add("--json", action="store_true", help="print JSON")
    add(
        "overrides",
        nargs="*",
        default=(),
        metavar="MODEL | key=value",
        help="what to examine; any setting, e.g. model.enable_thinking=false",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from any_agent.doctor.run import run

    return run(arguments)
