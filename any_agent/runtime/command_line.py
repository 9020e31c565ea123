"""Command lines whose options may stand anywhere, options of several commands, and their errors."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence

from any_agent.errors import AnyAgentError, ConfigError, StartupError

_LISTS = ("ids", "overrides")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """As ``parser.parse_args``, but a list of arguments may go on behind an option.

    argparse takes what stands before the option for all of the list, even if that is nothing, and
    its own remedy (parse_intermixed_args) knows no commands.
    """
    arguments, rest = parser.parse_known_args(argv)
    name = next((name for name in _LISTS if hasattr(arguments, name)), None)
    if rest and (name is None or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if name is not None:
        setattr(arguments, name, [*getattr(arguments, name), *rest])
    return arguments


def guarded(run: Callable[[], int]) -> int:
    """Errors as a line on standard error and an exit code, not as a traceback."""
    try:
        return run()
    except (ConfigError, StartupError) as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    except AnyAgentError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of everything that is configured by YAML."""
    parser.add_argument("--config", metavar="FILE", help="YAML settings")
    parser.add_argument("--model", metavar="PATH", help="short for model.path=PATH")
    parser.add_argument("--experiment", metavar="NAME", help="short for experiment=NAME")
    parser.add_argument("--trial", metavar="NAME", help="short for trial=NAME")
    parser.add_argument("--host", metavar="HOST", help="short for server.host=HOST")
    parser.add_argument("--port", metavar="PORT", help="short for server.port=PORT")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="any setting by its dotted name, e.g. train.lr=1e-5; `any-agent config` lists them",
    )


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """The long forms of the short options, then the given ones."""
    short = {
        "model": "model.path",
        "experiment": "experiment",
        "trial": "trial",
        "host": "server.host",
        "port": "server.port",
    }
    out = []
    for option, key in short.items():
        value = getattr(arguments, option)
        if value is not None:
            out.append(f"{key}={value}")
    return out + list(arguments.overrides)


def count(most: int) -> Callable[[str], int]:
    """A whole number from 1 to ``most``."""

    def counted(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {most}")
        return int(text)

    return counted


def number(text: str) -> float:
    """A finite one."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return value


def seconds(text: str) -> float:
    """A finite number above 0."""
    try:
        value = number(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value
