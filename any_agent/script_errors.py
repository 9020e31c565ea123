"""How a person's own script ends by an error of ours: one line and an exit code, as commands do."""

from __future__ import annotations

import sys
from types import TracebackType

from any_agent.errors import AnyAgentError


def one_line_errors(*, debug: bool = False) -> None:
    """From now on an AnyAgentError that nobody catches is told as a command of ours tells it.

    The exit code is the error's own, 2 for settings and 1 for what failed. All other errors keep
    their traceback, and with ``debug`` (`log_level=debug`) these do, too. Where another hook is
    there already (a notebook's, a debugger's), or a person types, nothing changes.
    """
    if debug and sys.excepthook is _told:
        sys.excepthook = sys.__excepthook__
    elif not debug and sys.excepthook is sys.__excepthook__ and not _is_interactive():
        sys.excepthook = _told


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, AnyAgentError):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: {error.message}", file=sys.stderr)
    # The one way to an exit code from here, and the interpreter ends as ever.
    raise SystemExit(getattr(error, "exit_code", 1)) from None
