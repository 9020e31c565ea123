"""``any-agent cloud``: a service for many accounts, which starts a run for each training."""

from __future__ import annotations

import argparse
import os
import sys

from any_agent.runtime.command_line import WORDS, option, require_installed

_DESCRIPTION = """\
Serve many accounts at one URL: an account has a key and nothing else, points an agent here, and a
run is started for it, queued while no place is free, stopped while nothing asks for it, and started
again where it was. docs/how-to/run-a-service.md has the file and the routes.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "cloud",
        help="serve many accounts at one URL, with a run for each of their trainings",
        description=_DESCRIPTION,
        epilog=WORDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option(parser, "--config FILE", "the YAML of models, presets and limits", required=True)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    require_installed("train")
    sys.stdout.flush()
    command = [sys.executable, "-m", "router.cloud", "--config", arguments.config]
    os.execv(sys.executable, command)
