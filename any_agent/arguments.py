"""Command lines whose options may stand anywhere."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

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
