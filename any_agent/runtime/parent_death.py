"""End a child process together with its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Looked up at import: between fork and exec a lock that another thread had taken is never released,
# and the loader of libraries takes some.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def die_with_parent(parent: int, number: int) -> None:
    """Ask for this signal when ``parent`` dies; call it in the child, before its program starts.

    Only Linux offers this; elsewhere whoever ends the parent must end the child.
    """
    # A shell starts background jobs with SIGINT ignored, which would be inherited.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        # The parent died before the line above: the signal will not come any more.
        os._exit(1)
