"""Command lines: shared options, argument types, and errors as one line and an exit code."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from traceback import format_exception
from types import TracebackType
from typing import Any, NoReturn

from any_agent.errors import AnyAgentError, ConfigError, StartupError
from any_agent.runtime.disk_space import is_disk_full
from any_agent.runtime.file_owner import no_access
from any_agent.runtime.logs import own_place

_SERVING = (
    *("httptools", "jinja2", "litellm", "llguidance", "msgpack", "numpy", "openai", "orjson"),
    *("pebble", "prometheus_client", "psutil", "renderers", "safetensors", "torch"),
    *("transformers", "uvloop"),
)
"""Modules without which nothing is served; the light install lacks them."""
_DRAWING = ("matplotlib", "rich", "shtab")
"""Further modules that the light install lacks, which commands import where they use them."""
_LISTS = ("ids", "overrides")
_SHORT = {
    "model": ("PATH", "model.path"),
    "experiment": ("NAME", "experiment"),
    "trial": ("NAME", "trial"),
    "host": ("HOST", "server.host"),
    "port": ("PORT", "server.port"),
    "litellm-config": ("FILE", "litellm.config"),
}
"""Options that stand for a setting: the metavar and the setting's name."""
WORDS = "The words: docs/reference/glossary.md."
"""The last words of the help of a command whose output has words of its own."""
SLOW = 2.0
"""Seconds after which a command says why it waits."""
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class CommandParser(argparse.ArgumentParser):
    """A parser, also of its commands, whose errors are one line, with the choice that was meant."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        known = [str(choice) for choice in action.choices or ()]
        if known and str(value) not in known:
            near = get_close_matches(str(value), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise argparse.ArgumentError(action, f"there is no {value!r}; {hint}")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help)\n")


def parse(parser: CommandParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse like ``parser.parse_args``, but let a list of arguments continue after an option.

    argparse ends the list at the option, and its parse_intermixed_args does not support
    subcommands.
    """
    arguments, rest = parser.parse_known_args(argv)
    name = next((name for name in _LISTS if hasattr(arguments, name)), None)
    options = [text for text in rest if text.startswith("-")]
    if options or (rest and name is None):
        chosen = _chosen(parser, arguments)
        said = _about_option(chosen, options[0]) if options else f"unexpected argument {rest[0]!r}"
        chosen.error(said)
    if name is not None:
        setattr(arguments, name, [*getattr(arguments, name), *rest])
    return arguments


def _chosen(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> argparse.ArgumentParser:
    """Return the parser of the command that the arguments name."""
    for below in _commands_of(parser):
        if (name := getattr(arguments, below.dest, None)) is not None:
            return _chosen(below.choices[name], arguments)
    return parser


def _commands_of(
    parser: argparse.ArgumentParser,
) -> list[argparse._SubParsersAction[argparse.ArgumentParser]]:
    return [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]


def _about_option(parser: argparse.ArgumentParser, given: str) -> str:
    """Say that a command has no such option, and which one was meant."""
    option = given.partition("=")[0]
    below = [one for found in _commands_of(parser) for one in found.choices.values()]
    for one in (parser, *below):
        if option in one._option_string_actions:
            return f"{option} stands after the command, as in {one.prog} {option}"
    known = get_close_matches(option, parser._option_string_actions, n=1)
    return f"unknown option {option}" + (f"; did you mean {known[0]}?" if known else "")


def guarded(run: Callable[[], int]) -> int:
    """Run a command; print an error as one line on standard error and return its exit code.

    A module that the light install leaves out is such an error, too. The code is 141, as of a
    program that SIGPIPE ended, once the reader of the output has left.
    """
    try:
        return run()
    except AnyAgentError as error:
        return _print_error(error)
    except ModuleNotFoundError as error:
        if (left_out := _left_out(error)) is None:
            raise
        return _print_error(left_out)
    except BrokenPipeError:
        # Otherwise Python tries to write the rest at its exit, and reports that it could not.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if isinstance(error, PermissionError) and error.filename is not None:
            return _print_error(no_access(error))
        if not is_disk_full(error):
            raise
        where = f" of {error.filename}" if error.filename else ""
        return _print_error(StartupError(f"the disk{where} is full: free some space"))
    except KeyboardInterrupt:
        return 130


def require_installed(extra: str) -> None:
    """Raise ConfigError with the pip command if the modules that serve a model are not all here.

    Processes that a command starts import them, so the command itself would start without.
    """
    missing = [name for name in _SERVING if find_spec(name) is None]
    if missing:
        raise _not_installed(missing, extra)


def _left_out(error: ModuleNotFoundError) -> ConfigError | None:
    """Return the error with the pip command for a module that the light install leaves out."""
    missing = (error.name or "").partition(".")[0]
    return _not_installed([missing], "train") if missing in (*_SERVING, *_DRAWING) else None


def _not_installed(modules: Sequence[str], extra: str) -> ConfigError:
    return ConfigError(
        f"this needs {', '.join(modules)}, which the light install leaves out: "
        f"pip install 'any-agent-rl[{extra}]' (in a clone: pip install '.[{extra}]')"
    )


def say(line: str) -> None:
    """Print a line of a service that must not end because its output is on a full disk."""
    with suppress(OSError):
        print(line, flush=True)


@contextmanager
def told_if_slow(tell: Callable[[str], None], line: str) -> Iterator[None]:
    """Tell why the program waits, once the block has taken :data:`SLOW` seconds."""
    timer = threading.Timer(SLOW, tell, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def one_line_errors(*, debug: bool = False, place: bool = False) -> None:
    """Print an uncaught AnyAgentError of this script as commands do: one line and its exit code.

    So is the lack of a module that the light install leaves out. The exit code is the error's own:
    2 for settings, 1 for failures. All other errors keep their traceback; with ``debug``
    (`log_level=debug`) an AnyAgentError keeps it, too. With ``place`` a second line has the place
    in the script, as calls of the SDK stand in many. Nothing changes in an interactive
    interpreter, or where another hook is installed (a notebook's, a debugger's).
    """
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if debug and sys.excepthook in (_print_one_line, _print_with_place):
        sys.excepthook = sys.__excepthook__
    elif not debug and sys.excepthook is sys.__excepthook__ and not interactive:
        sys.excepthook = _print_with_place if place else _print_one_line


def _print_one_line(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    *,
    place: bool = False,
) -> None:
    said = _left_out(error) if isinstance(error, ModuleNotFoundError) else _alone(error)
    if not isinstance(said, AnyAgentError):
        sys.__excepthook__(kind, error, trace)
        return
    code = _print_error(said)
    if place and (where := own_place("".join(format_exception(said)))):
        print(f"  at {where}", file=sys.stderr)
    # The only way to set an exit code from here; the interpreter ends as usual.
    raise SystemExit(code) from None


_print_with_place = partial(_print_one_line, place=True)


def _alone(error: BaseException) -> BaseException:
    """Return the first error of a group, as a TaskGroup raises, that has only errors of ours."""
    while isinstance(error, BaseExceptionGroup) and error.split(AnyAgentError)[1] is None:
        error = error.exceptions[0]
    return error


def _print_error(error: AnyAgentError) -> int:
    said = "; ".join((error.message, *getattr(error, "__notes__", ())))
    print(f"error: {said}", file=sys.stderr)
    return int(getattr(error, "exit_code", 1))


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that starts or configures a service."""
    help = "any setting by its dotted name, e.g. train.lr=1e-5; `any-agent config` lists them"
    add_setting_arguments(parser, tuple(_SHORT), help=help)


def add_trial_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that works on a trial's folder."""
    add_setting_arguments(parser, ("experiment", "trial"), help="any setting, e.g. root=FOLDER")


def add_setting_arguments(
    parser: argparse.ArgumentParser,
    short: Sequence[str],
    *,
    help: str,
    metavar: str = "key=value",
) -> None:
    """Add ``--config``, these short options, and the list ``overrides`` of settings."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    add_short_options(parser, short)
    parser.add_argument("overrides", nargs="*", default=(), metavar=metavar, help=help)


def add_short_options(
    parser: argparse.ArgumentParser, short: Sequence[str] = tuple(_SHORT)
) -> None:
    """Add these options that stand for settings; by default all."""
    for option in short:
        name, setting = _SHORT[option]
        parser.add_argument(f"--{option}", metavar=name, help=f"short for {setting}={name}")


def overrides_of(arguments: argparse.Namespace) -> list[str]:
    """Return the settings that the short options stand for, then the given overrides."""
    given = {
        setting: getattr(arguments, option.replace("-", "_"), None)
        for option, (_, setting) in _SHORT.items()
    }
    named = [f"{setting}={value}" for setting, value in given.items() if value is not None]
    return [*named, *arguments.overrides]


def option(parser: argparse._ActionsContainer, name: str, help: str, **settings: Any) -> None:
    """Add an option; ``name`` is ``--name METAVAR``, or ``--name`` for a switch."""
    flag, _, metavar = name.partition(" ")
    if metavar:
        settings["metavar"] = metavar
    else:
        settings.setdefault("action", "store_true")
    parser.add_argument(*flag.split(","), help=help, **settings)


def add_commands(
    parser: argparse.ArgumentParser, dest: str
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """Return what adds commands below a parser; without one it prints its help and ends with 2."""

    def say_which(_: argparse.Namespace) -> int:
        parser.print_help(sys.stderr)
        return 2

    parser.set_defaults(run=say_which)
    return parser.add_subparsers(dest=dest, metavar="COMMAND", help="the action")


def add_below(
    below: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help: str,
    *,
    epilog: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    """Add a command below another one, which prints a table, or JSON with ``--json``."""
    parser = below.add_parser(name, help=help, description=help, epilog=epilog)
    option(parser, "--json", "print JSON")
    parser.set_defaults(run=run)
    return parser


def add_program(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    module: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    *,
    help: str,
    description: str,
    epilog: str,
    extra: str = "serve",
) -> None:
    """Add a command that a program of its own does, ``python -m MODULE``, with its arguments.

    The texts are shown as they are written. ``extra`` is the one that the program is a part of:
    without it the command is a ConfigError.
    """

    def become(_: argparse.Namespace) -> NoReturn:
        require_installed(extra)
        share_module_path()
        arguments = sys.argv[sys.argv.index(name) + 1 :]
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])

    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(run=become)


def share_module_path() -> None:
    """Let child processes find the packages that this process found, installed or not."""
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))


def printable(text: str) -> str:
    """Return the text on one line without control characters, which agents and models write."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of equal lengths as lines, their cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def duration(text: str) -> float:
    """Parse a time with its unit, like 12h, into seconds."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd])", text)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time with its unit, like 90s, 12h or 30d"
        )
    return float(match[1]) * UNIT_SECONDS[match[2]]


def count(most: int, *, least: int = 1) -> Callable[[str], int]:
    """Return an argument type: a whole number from ``least`` to ``most``."""

    def parse_count(text: str) -> int:
        whole = text.isascii() and text.isdecimal() and len(text) <= 20
        if not whole or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number from {least} to {most}"
            )
        return int(text)

    return parse_count


def number(text: str) -> float:
    """Parse a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def positive(text: str, what: str = "number") -> float:
    """Parse a finite number above 0; ``what`` names it in the error."""
    try:
        value = number(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a {what} above 0")
    return value


seconds = partial(positive, what="number of seconds")


def moment(text: str) -> float:
    """Parse a time, or how long ago it was, into seconds since the epoch."""
    age, unit = text[:-1], text[-1:]
    if unit in UNIT_SECONDS and age.isascii() and age.isdecimal():
        return time.time() - int(age) * UNIT_SECONDS[unit]
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: write it like 2026-01-31T12:00, 90m, 12h or 7d"
        ) from None
