"""End a child process together with its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Looked up at import: after a fork, a lock of the library loader that another thread holds is never
# released.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def die_with_parent(parent: int, number: int) -> None:
    """Ask for this signal when ``parent`` dies; call it in the child, before its program starts.

    Only Linux offers this; elsewhere the child must be ended with its parent by hand.
    """
    # A shell starts background jobs with SIGINT ignored, which would be inherited.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        # The parent died before the line above: the signal will not come any more.
        os._exit(1)
