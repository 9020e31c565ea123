"""What runs in a worker process: light, as each worker imports it anew.

Only bytes enter and leave it, so that what cannot be sent is told of where it is known by name.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import os
import pickle
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_MAX_TRACE = 8000
"""Characters of a traceback that are kept: its end."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a function raised, as text: not every exception can leave its process."""

    kind: str
    message: str
    trace: str


def begin(parent: int, secrets: Sequence[str]) -> None:
    """A worker neither outlives its parent, nor takes the Ctrl-C that is meant for it.

    It forgets these variables: what it runs, an agent's tools say, has no use for an operator's.
    """
    for name in secrets:
        os.environ.pop(name, None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def call(packed: bytes, environ: Mapping[str, str]) -> bytes | Failure:
    """Run a packed function with its arguments under these variables, a coroutine to its end.

    The packed result, or what went wrong.
    """
    before = dict(os.environ)
    os.environ.update(environ)
    had_loop = False
    try:
        function, args, kwargs = pickle.loads(packed)
        result = function(*args, **kwargs)
        if inspect.iscoroutine(result):
            had_loop = True
            result = asyncio.run(result)
        return pickle.dumps(result)
    except BaseException as error:  # also one that exits: it ends its call, not the worker
        return _failure(error)
    finally:
        os.environ.clear()
        os.environ.update(before)
        if had_loop:
            # HTTP clients that nobody closed would close themselves in the next call's event loop,
            # which is not theirs.
            gc.collect()


def _failure(error: BaseException) -> Failure:
    try:
        message = str(error)
    except Exception:
        message = "(its text cannot be had)"
    trace = "".join(traceback.format_exception(error))[-_MAX_TRACE:]
    return Failure(type(error).__name__, message[:_MAX_TRACE], trace)
