"""Public names of packages that are imported when they are first used: most of them bring much."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import Any

_tell = partial(print, file=sys.stderr, flush=True)


def public_name(module: str, name: str) -> Any:
    """Import a name from its module, for a package's ``__getattr__``.

    A script that waits for that is told so, as the first import of torch takes a while; one that
    the light install cannot run ends with one line, as commands do.
    """
    if (found := sys.modules.get(module)) is not None and hasattr(found, name):
        return getattr(found, name)
    # Not above: it would be a third of the time that `import any_agent` takes.
    from any_agent.runtime.command_line import one_line_errors, told_if_slow

    try:
        with told_if_slow(_tell, f"importing {module}: the first time this takes a while"):
            return getattr(import_module(module), name)
    except ModuleNotFoundError:
        one_line_errors()
        raise
