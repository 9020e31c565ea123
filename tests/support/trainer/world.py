"""Processes that train together, on gloo, forked from one that has torch already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from tests.support.ports import own_port
from trainer.world import World, join, leave

_WITHIN = 400.0
_CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
_IMPORTED = [
    "tests.support.trainer.world_cases",
    "transformers.models.qwen3.modeling_qwen3",
    "trainer.sharded_optimizer",
]
"""Seconds that each process would need for them."""


class Died(AssertionError):
    """A process ended without a result."""


class Crashed(Died):
    """Native code ended a process by a signal."""


def together(
    size: int,
    case: Callable[..., Any],
    *arguments: Any,
    dying: Sequence[int] = (),
    stopped: Sequence[int] = (),
    again: bool = True,
) -> list[Any]:
    """What ``case(world, *arguments)``, a module's function, returns in each process, by rank;
    of those ``dying`` or ``stopped`` nothing is expected.

    Raises Died with the traceback of a process in which it failed. If native code crashed, it is
    tried ``again`` with a warning: glibc once found torch's heap damaged on one machine, which
    twenty runs under its checks did not show again.
    """
    port, context = own_port(), _context()
    ends = []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_run, args=(theirs, rank, size, port, case, arguments), daemon=True
        )
        process.start()
        theirs.close()
        ends.append((process, ours))
    try:
        silent = {*dying, *stopped}
        results = [_result(k, *end) for k, end in enumerate(ends) if k not in silent]
        for rank in dying:
            ends[rank][0].join(_WITHIN)
            assert not ends[rank][0].is_alive(), f"rank {rank} did not die"
        return results
    except Crashed as crash:
        if not again:
            raise
        warnings.warn(f"{case.__name__}: {crash}; tried again", stacklevel=2)
    finally:
        for process, _ in ends:
            process.kill()
            process.join()
    return together(size, case, *arguments, dying=dying, stopped=stopped, again=False)


def _result(rank: int, process: ForkServerProcess, ours: Connection) -> Any:
    if not ours.poll(_WITHIN):
        raise Died(f"rank {rank} said nothing for {_WITHIN:g} s")
    try:
        failed, what = pickle.loads(ours.recv_bytes())
    except EOFError:
        process.join(_WITHIN)
        died = Crashed if process.exitcode in _CRASHES else Died
        raise died(f"rank {rank} ended with {process.exitcode}, without a word") from None
    if failed:
        raise Died(f"rank {rank}:\n{what}")
    return what


@cache
def _context() -> ForkServerContext:
    # The server imports what it is told to before it forks; it knows the way by this alone.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def _run(
    theirs: Connection,
    rank: int,
    size: int,
    port: int,
    case: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    try:
        world: World = join("cpu")
        result = case(world, *arguments)
        leave()
    except BaseException:
        theirs.send_bytes(pickle.dumps((True, traceback.format_exc())))
    else:
        # Not by `send`: that would share tensors' memory, which ends with this process.
        theirs.send_bytes(pickle.dumps((False, result)))
    theirs.close()
