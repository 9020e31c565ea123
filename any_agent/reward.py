"""Reward functions that block or compute, kept off the event loop that episodes run on."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from any_agent.errors import AnyAgentError
from any_agent.workers import (
    WorkerCrashed,
    WorkerFailed,
    WorkerPool,
    WorkerTimeout,
    pack,
    shared_pool,
)

log = logging.getLogger(__name__)


class RewardFailed(AnyAgentError):
    """A reward function gave no reward; says what it did instead."""

    default_code = "reward_failed"


class AsyncRewardWrapper:
    """Makes an ordinary reward function awaitable: it runs in a process of a pool.

    Ready workflows call it as
    ``reward_fn(prompt, completions, prompt_ids, completion_ids, **data)``
    with both texts, both lists of token ids and the dataset item's fields; others as they like. A
    coroutine function is awaited where it is, since it does not block.

    A call that takes longer than ``timeout_seconds`` counts as ``timeout_reward``, and is logged:
    what such functions hang on is nearly always an answer that makes no sense. None: it raises
    instead. A call that raises, or takes its process down, is repeated up to ``max_retries`` times.
    Wrappers of one ``max_workers`` (default: half of the machine's cores) share their processes.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any],
        timeout_seconds: float = 15.0,
        max_workers: int | None = None,
        max_retries: int = 3,
        *,
        timeout_reward: float | None = 0.0,
    ) -> None:
        """ConfigError for a function that cannot be sent to another process."""
        self.reward_fn = reward_fn
        self.timeout_seconds = timeout_seconds
        self.max_retries = max_retries
        self.timeout_reward = timeout_reward
        self.timeouts = 0
        """Calls that took too long."""
        self._pool: WorkerPool | None = None
        if not inspect.iscoroutinefunction(reward_fn):
            pack(reward_fn)
            workers = max_workers or max(1, (os.cpu_count() or 1) // 2)
            self._pool = shared_pool("rewards", workers)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns; RewardFailed after its last try."""
        for left in range(self.max_retries, -1, -1):
            try:
                return await self._once(*args, **kwargs)
            except (TimeoutError, WorkerTimeout):
                return self._late()
            except WorkerFailed as error:
                if left:
                    log.info("%s: %s; trying again", self._name, error)
                    continue
                trace = f"\n{error.failure.trace}" if error.failure is not None else ""
                did = "took its process down" if isinstance(error, WorkerCrashed) else "failed"
                raise RewardFailed(
                    f"the reward function {self._name} {did}: {error}{trace}"
                ) from None
        raise AssertionError

    async def _once(self, *args: Any, **kwargs: Any) -> Any:
        if self._pool is None:
            async with asyncio.timeout(self.timeout_seconds):
                return await self.reward_fn(*args, **kwargs)
        return await self._pool.run(self.reward_fn, *args, timeout=self.timeout_seconds, **kwargs)

    @property
    def _name(self) -> str:
        name = getattr(self.reward_fn, "__qualname__", repr(self.reward_fn))
        return f"{getattr(self.reward_fn, '__module__', '')}.{name}"

    def _late(self) -> float:
        self.timeouts += 1
        said = f"the reward function {self._name} took more than {self.timeout_seconds:g} s"
        if self.timeout_reward is None:
            raise RewardFailed(said, code="reward_timeout")
        log.warning("%s: its reward is %g (%d so far)", said, self.timeout_reward, self.timeouts)
        return self.timeout_reward
