"""The code of a worker process; its imports are light, as each worker repeats them.

Only bytes enter and leave a worker, so that values that cannot be sent are reported by name.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import pickle
import signal
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from any_agent.runtime.signals import die_with_parent

_MAX_TRACE = 8000  # characters of a traceback that are kept, counted from its end


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a function as text: not every exception can be sent to another process."""

    kind: str
    message: str
    trace: str


def begin(parent: int) -> None:
    """Start a worker that ends with its parent and ignores the Ctrl-C that is meant for it."""
    die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def call(packed: bytes, environ: Mapping[str, str]) -> bytes | Failure:
    """Run a packed function with these variables set, a coroutine to its end.

    Returns the packed result, or the failure.
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
    except BaseException as error:  # SystemExit, too, ends its call and not the worker
        return _failure(error)
    finally:
        os.environ.clear()
        os.environ.update(before)
        if had_loop:
            # HTTP clients that were left open would otherwise be closed in the next call's event
            # loop, which is not theirs.
            gc.collect()


def _failure(error: BaseException) -> Failure:
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be read)"
    trace = "".join(traceback.format_exception(error))[-_MAX_TRACE:]
    return Failure(type(error).__name__, message[:_MAX_TRACE], trace)
