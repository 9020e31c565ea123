"""Rewards that a function of the operator's gives (`sessions.grader`), in processes of their own.

A grader may hang, crash or eat its memory: it runs in a worker that is killed after
`sessions.grader_timeout`, and whatever goes wrong in it is one :class:`GraderFailed`. Workers are
started when they are first needed, and die with this process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Mapping
from typing import Any

from pebble import ProcessExpired, ProcessPool

from any_agent.config import SessionConfig
from any_agent.errors import ConfigError
from any_agent.protocol.rl import as_reward
from any_agent.rewards import grader as grading
from any_agent.rewards.grader import short
from proxy_ext.sessions.grader_main import die_with
from proxy_ext.sessions.rewards import Parts, parts_of
from proxy_ext.sessions.session import RecordedSession

_WORKERS = 2


class GraderFailed(Exception):
    """There is no reward; says why."""


def graded_session(session: RecordedSession) -> dict[str, Any]:
    """What a grader is given: a dict of plain values.

    Each interaction has its whole conversation: ``messages`` and the answer, ``output_message``.
    """
    tree, row = session.tree, session.row
    return {
        "session_id": row.id,
        "mode": str(row.mode),
        "task_id": row.task_id,
        "metadata": row.metadata,
        "interactions": [
            {
                "id": i.id,
                "parent_id": i.parent_id,
                "messages": tree.messages(i.id),
                "output_message": i.output_message,
                "finish_reason": i.finish_reason,
            }
            for i in tree
        ],
    }


class Grader:
    """``name`` is "module.function"; it may be a coroutine function.

    It takes what :func:`graded_session` makes, and returns a number or several by name.
    """

    def __init__(self, name: str, *, timeout: float) -> None:
        self.name = name
        self._timeout = timeout
        self.free = asyncio.Semaphore(_WORKERS)
        """A worker that has nothing to do. Who grades takes one first: the time-out is the grader's
        alone then, and nothing is read for a session whose turn is far off."""
        self._pool: ProcessPool | None = None
        self._results: set[asyncio.Future[Any]] = set()
        """Of what its workers are at."""

    async def check(self) -> None:
        """GraderFailed if there is no such function, or importing it takes too long."""
        await self._run(grading.find, self.name)

    async def grade(self, session: Mapping[str, Any]) -> Parts:
        """The final reward; GraderFailed. The caller has a worker that is ``free``."""
        returned = await self._run(grading.grade, self.name, dict(session))
        try:
            return parts_of(as_reward(returned))
        except ValueError as error:
            raise GraderFailed(f"it returned {short(repr(returned))}: {error}") from None

    async def close(self) -> None:
        """End the workers, also in the middle of a grade."""
        pool, self._pool = self._pool, None
        results, self._results = self._results, set()
        if pool is not None:
            await asyncio.to_thread(_end, pool)
        for result in results:
            # A pool that is stopped may leave some for ever as they are.
            result.cancel()

    async def _run(self, function: Any, *arguments: Any) -> Any:
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=_WORKERS,
                initializer=die_with,
                initargs=(os.getpid(),),
                context=multiprocessing.get_context("spawn"),
            )
        pool = self._pool
        try:
            worked, result = await self._result(pool, function, *arguments)
        except TimeoutError:
            raise GraderFailed(f"it took more than {self._timeout:g} s") from None
        except ProcessExpired as error:
            raise GraderFailed(f"its process died (exit code {error.exitcode})") from None
        except (asyncio.CancelledError, Exception) as error:
            if _is_cancelled():
                raise
            if pool is not self._pool:
                # Ended together with its pool, by what ailed another grade.
                raise GraderFailed("the processes of all graders were ended") from None
            # Whatever ails this pool, the next grade begins with another one.
            await self.close()
            raise GraderFailed(f"it could not be run: {short(str(error))}") from error
        if not worked:
            raise GraderFailed(short(str(result)))
        return result

    async def _result(self, pool: ProcessPool, function: Any, *arguments: Any) -> Any:
        future = pool.schedule(function, args=arguments, timeout=self._timeout)
        result = asyncio.wrap_future(future)
        self._results.add(result)
        try:
            return await result
        finally:
            self._results.discard(result)


def grader_of(config: SessionConfig) -> Grader | None:
    """What grades sessions that no reward came for, if that is asked for."""
    if config.late_reward != "grade" and not config.implicit:
        return None
    return Grader(config.grader, timeout=config.grader_timeout)


async def check_grader(config: SessionConfig) -> None:
    """ConfigError if the grader cannot be used."""
    grader = grader_of(config)
    if grader is None:
        return
    try:
        await grader.check()
    except GraderFailed as error:
        raise ConfigError(f"sessions.grader={grader.name} cannot be used: {error}") from None
    finally:
        await grader.close()


def _is_cancelled() -> bool:
    """Whether it is this task itself that is to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _end(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
