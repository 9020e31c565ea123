"""Run functions in worker processes, where a call that blocks, hangs or crashes harms no other."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import io
import os
import pickle
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from any_agent.errors import ConfigError
from any_agent.runtime.environment import environment_without
from any_agent.runtime.worker_main import Failure, begin, call

if TYPE_CHECKING:
    from pebble import ProcessPool

T = TypeVar("T")

_ENDED = "the processes of all calls were ended"
_NOT_STARTED = (
    "each worker imports the script that was started, so keep what the script does under "
    'if __name__ == "__main__":'
)


class WorkerFailed(Exception):
    """A call in a worker failed; ``failure`` holds the exception if the function raised one."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class WorkerTimeout(WorkerFailed):
    """The call took too long, and its worker was killed."""


class WorkerCrashed(WorkerFailed):
    """The worker of the call died."""


class _Starter:
    """A thread that starts processes, and lives as long as this process.

    Linux ends a child with the *thread* that started it, as the event loop of an executor.
    """

    def __init__(self) -> None:
        self._wanted: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def call(self, start: Callable[[], T]) -> T:
        """Return ``start()``, called in the thread."""
        future: Future[T] = Future()
        with self._lock:
            # A fork has this object, but not the thread.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="starter", daemon=True)
                self._thread.start()
            self._wanted.put((start, future))
        return future.result()

    def _run(self) -> None:
        while True:
            start, future = self._wanted.get()
            try:
                future.set_result(start())
            except BaseException as error:
                future.set_exception(error)


_starter = _Starter()


class _CleanPopen(popen_spawn_posix.Popen):
    """Starts a process without some environment variables: one that a process drops after its start
    stays in its `/proc/PID/environ`.

    This process's own variables stay as they are, because other threads read them meanwhile.
    """

    _fds: list[int]
    """Descriptors that the process inherits, as the library collects them."""

    def _launch(self, process_obj: Any) -> None:
        """Do what the library does, which has no way to give a process another environment."""
        sent = io.BytesIO()
        tracker: Any = resource_tracker.getfd()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), sent)
            reduction.dump(process_obj, sent)
        finally:
            set_spawning_popen(None)
        self.sentinel, child_end = os.pipe()
        child_start, start = os.pipe()
        # The child ends when it sees the end of `start`, so that is open until then.
        self.finalizer = util.Finalize(self, _close, (self.sentinel, start))
        try:
            process = _starter.call(
                lambda: subprocess.Popen(
                    spawn.get_command_line(tracker_fd=tracker, pipe_handle=child_start),
                    env=environment_without(process_obj.secrets),
                    pass_fds=[*self._fds, tracker, child_start, child_end],
                    restore_signals=False,
                )
            )
        finally:
            os.close(child_start)
            os.close(child_end)
        self.pid = process.pid
        process.returncode = 0  # this class waits for it
        with open(start, "wb", closefd=False) as file:
            file.write(sent.getbuffer())


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _CleanProcess(SpawnProcess):
    secrets: Sequence[str] = ()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _CleanPopen(process_obj)


class _CleanContext(SpawnContext):
    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__()
        self._secrets = secrets

    def Process(self, *args: Any, **kwargs: Any) -> _CleanProcess:  # type: ignore[override]
        process = _CleanProcess(*args, **kwargs)
        process.secrets = self._secrets
        return process


_pools: WeakSet[WorkerPool] = WeakSet()


class WorkerPool:
    """Processes that run functions, each one call at a time.

    They are started when they are first needed, by ``spawn`` (a fork of a process with threads may
    hang), so functions and arguments are pickled: functions must be at the top level of a module. A
    worker that hangs or dies is replaced. All workers end with this process. They start without
    the environment variables ``secrets``, which agents and graders have no use for.
    """

    def __init__(self, max_workers: int, *, secrets: Sequence[str] = ()) -> None:
        if max_workers < 1:
            raise ConfigError(f"max_workers is {max_workers}: a pool needs one worker at least")
        self.max_workers = max_workers
        self._secrets = tuple(secrets)
        self._lock = threading.Lock()
        self._pool: ProcessPool | None = None
        self._served = False
        """True once a worker of the present pool has answered a call."""
        self._futures: dict[Future[Any], ProcessPool] = {}
        """The pool of each call that is running or waits for a worker."""
        _pools.add(self)

    async def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float,  # noqa: ASYNC109 - of the worker, which is killed
        environ: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what the function returns; a coroutine is run to its end in the worker.

        The call is ended ``timeout`` seconds after a worker has begun it, or when it is cancelled.
        Raises WorkerTimeout, WorkerCrashed, WorkerFailed (the function raised), ConfigError (the
        function or an argument cannot be pickled).
        """
        packed = pack(function, args, kwargs)
        pool = self._started()
        from pebble import ProcessExpired

        given = [packed, dict(environ or {})]
        try:
            future = pool.schedule(call, args=given, timeout=timeout)
        except RuntimeError:
            # The pool broke, or was closed, while no call was running.
            await asyncio.to_thread(self._drop, pool)
            pool = self._started()
            future = pool.schedule(call, args=given, timeout=timeout)
        self._futures[future] = pool
        try:
            result: bytes | Failure = await asyncio.wrap_future(future)
            self._served = True
        except TimeoutError:
            raise WorkerTimeout(f"it took more than {timeout:g} s, and was ended") from None
        except ProcessExpired as error:
            raise WorkerCrashed(f"its process died (exit code {error.exitcode})") from None
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise WorkerCrashed(_ENDED) from None
        except Exception as error:
            if pool is not self._pool:
                # The pool was closed, or dropped because of another call.
                raise WorkerCrashed(_ENDED) from None
            # This pool may be broken, so the next call starts another one.
            await asyncio.to_thread(self._drop, pool)
            raise WorkerFailed(f"no worker could run it ({error}): {_NOT_STARTED}") from error
        finally:
            self._futures.pop(future, None)
        if isinstance(result, Failure):
            raise WorkerFailed(f"{result.kind}: {result.message}", result)
        return pickle.loads(result)

    @property
    def starting(self) -> int:
        """The number of calls that wait for the first workers, which have begun no call so far."""
        calls = tuple(self._futures)
        return 0 if any(map(Future.running, calls)) or self._served else len(calls)

    def close(self) -> None:
        """End the workers, also in the middle of a call; a later call starts new ones."""
        with self._lock:
            pool = self._pool
        if pool is not None:
            self._drop(pool)

    def _started(self) -> ProcessPool:
        from pebble import ProcessPool

        with self._lock:
            if self._pool is None:
                self._served = False
                self._pool = ProcessPool(
                    max_workers=self.max_workers,
                    initializer=begin,
                    initargs=(os.getpid(),),
                    context=_CleanContext(self._secrets),
                )
            return self._pool

    def _drop(self, pool: ProcessPool) -> None:
        with self._lock:
            if self._pool is pool:
                self._pool = None
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()
        for future, of in tuple(self._futures.items()):
            # A stopped pool may leave some of its futures pending for ever.
            if of is pool:
                future.cancel()


def describe_starting() -> str | None:
    """Say for how many calls worker processes start in this process; None without any.

    On a busy machine that takes a minute: each imports the script and its libraries.
    """
    waiting = sum(pool.starting for pool in tuple(_pools))
    if not waiting:
        return None
    return f"worker processes are starting, for which {waiting} calls wait"


_shared: dict[tuple[str, int], WorkerPool] = {}
_lock = threading.Lock()


def shared_pool(purpose: str, max_workers: int, *, secrets: Sequence[str] = ()) -> WorkerPool:
    """Return the process's only pool of this purpose and size."""
    with _lock:
        if not _shared:
            atexit.register(_close_shared)
        return _shared.setdefault((purpose, max_workers), WorkerPool(max_workers, secrets=secrets))


def _close_shared() -> None:
    for pool in _shared.values():
        pool.close()


def pack(function: Callable[..., Any], args: Any = (), kwargs: Any = None) -> bytes:
    """Pickle a call for a worker; ConfigError names what cannot be sent to another process."""
    try:
        return pickle.dumps((function, args, kwargs or {}))
    except Exception as error:
        what = next(filter(None, map(unpicklable, (function, *args, kwargs))), None)
        raise ConfigError(
            f"{what or 'the function of a worker'} cannot be sent to another process ({error}): "
            "define functions and classes at the top level of a module, and make locks, clients "
            "and open files where they are used"
        ) from error


def unpicklable(value: Any, name: str = "", depth: int = 4) -> str | None:
    """Return the path and text of the part that cannot be pickled; None if all can be."""
    try:
        pickle.dumps(value)
    except Exception:
        for part, one in _parts(value, name) if depth else ():
            if found := unpicklable(one, part, depth - 1):
                return found
        return f"{name} ({repr(value)[:80]})" if name else repr(value)[:80]
    return None


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", one) for key, one in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{k}]", one) for k, one in enumerate(value))
    elif inspect.ismethod(value):
        yield name or type(value.__self__).__name__, value.__self__
    elif isinstance(getattr(value, "__dict__", None), dict) and not callable(value):
        prefix = name or type(value).__name__
        yield from ((f"{prefix}.{key}", one) for key, one in vars(value).items())


def _is_cancelled() -> bool:
    """Return whether the current task itself is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
