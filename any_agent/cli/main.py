"""The entry point ``any-agent COMMAND``.

Each module of a command has ``add_parser``, and imports what it needs when it runs.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from any_agent import __version__
from any_agent.cli import (
    cloud,
    completion,
    demo,
    doctor,
    eval,
    export,
    keys,
    model,
    ranks,
    regrade,
    replay,
    run,
    serve,
    sessions,
    sft,
    status,
)
from any_agent.runtime.command_line import WORDS, CommandParser, add_commands, guarded, parse

_COMMANDS = (
    *(demo, model, serve, run, doctor, status, sessions, replay, regrade, eval, export, sft),
    *(keys, ranks, cloud, completion),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 failed, 2 wrong input, 130 interrupted."""
    arguments = read(argv)
    return guarded(lambda: arguments.run(arguments))


def read(argv: Sequence[str] | None) -> Namespace:
    """Return what a command line asks for; SystemExit where it is none of ours."""
    return parse(_parser(), argv)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="any-agent",
        description="Makes any OpenAI-compatible agent trainable by reinforcement learning.",
        epilog="Something does not work? docs/how-to/troubleshoot.md has symptoms, causes and "
        f"remedies. {WORDS}",
    )
    parser.add_argument("--version", action="version", version=f"any-agent {__version__}")
    commands = add_commands(parser, "command")
    for command in _COMMANDS:
        command.add_parser(commands)
    commands.choices["completion"].set_defaults(whole=parser)
    return parser
