"""Public names of packages that are imported when they are first used: most of them bring much."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def public_name(module: str, name: str) -> Any:
    """Import a name from its module, for a package's ``__getattr__``.

    A script that the light install cannot run ends with one line, as commands do.
    """
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError:
        from any_agent.runtime.command_line import one_line_errors

        one_line_errors()
        raise
