"""Code that may await at its top, as a notebook runs it."""

from __future__ import annotations

import ast
import inspect
from typing import Any


async def running(
    code: str, given: dict[str, Any], names: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run the code among the given names, in the running event loop; return all names then.

    ``names`` are those of the module that it stands for.
    """
    # Dataclasses look their module up.
    names = {"__name__": __name__} if names is None else names
    names |= given
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    program = compile(code, "<document>", "exec", flags=flags, dont_inherit=True)
    result = eval(program, names)
    if inspect.iscoroutine(result):
        await result
    return names
