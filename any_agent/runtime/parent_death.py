"""A child process that does not outlive who started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Looked up here: between fork and exec a lock that another thread held is never let go, and the
# loader of libraries takes some.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def die_with_parent(parent: int, number: int) -> None:
    """In the child, before it becomes its program: get this signal when ``parent`` is killed.

    Where the system has no such thing, it is left to who ends the parent.
    """
    # A shell starts background jobs with SIGINT ignored, which would be inherited.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        # Killed before the line above: the signal will not come any more.
        os._exit(1)
