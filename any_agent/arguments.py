"""Command lines whose options may stand anywhere, and what options of several commands may be."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

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
