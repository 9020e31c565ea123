"""`AsyncRewardWrapper`: runs a reward function in a process pool; a reward function for GSM8K."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from typing import Any

from any_agent.config import SECRET_VARIABLES
from any_agent.errors import AnyAgentError, ConfigError
from any_agent.runtime.worker_pool import (
    WorkerCrashed,
    WorkerFailed,
    WorkerPool,
    WorkerTimeout,
    pack,
    shared_pool,
)

log = logging.getLogger(__name__)

_LONGEST = 10_000  # characters at the end of a text in which its final number is sought
_DEBT = re.compile(r"(?<![\w)\]}])-\$(?=[\d.])")
"""A sign before the dollar, which math-verify would lose."""
MATH_SECONDS = 3  # that math-verify may take to read a text, or to compare


class RewardFailed(AnyAgentError, code="reward_failed"):
    """A reward function returned no reward; the message has the reason."""


class AsyncRewardWrapper:
    """Makes an ordinary reward function awaitable: it runs in a process of a pool.

    The built-in workflows call it as
    ``reward_fn(prompt, completions, prompt_ids, completion_ids, **data)``
    with both texts, both lists of token ids and the dataset item's fields; others may call it in
    any way. A coroutine function is awaited in place, since it does not block.

    A call that takes longer than ``timeout_seconds`` returns ``timeout_reward``, and is logged:
    such functions nearly always hang on a senseless answer. With None it raises instead. A call
    that raises, or crashes its process, is repeated up to ``max_retries`` times. Wrappers with the
    same ``max_workers`` (default: half of the machine's cores) share their processes.
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
        """Raise ConfigError for a function that cannot be sent to another process."""
        self.reward_fn = reward_fn
        self.timeout_seconds = timeout_seconds
        self.max_retries = max_retries
        self.timeout_reward = timeout_reward
        self.timeouts = 0
        """The number of calls that took too long."""
        self._pool: WorkerPool | None = None
        if not inspect.iscoroutinefunction(reward_fn):
            pack(reward_fn)
            workers = max_workers or max(1, (os.cpu_count() or 1) // 2)
            self._pool = shared_pool("rewards", workers, secrets=SECRET_VARIABLES)

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result; RewardFailed after its last attempt."""
        for left in range(self.max_retries, -1, -1):
            try:
                return await self._once(*args, **kwargs)
            except (TimeoutError, WorkerTimeout):
                return self._reward_of_timeout()
            except WorkerFailed as error:
                if left:
                    log.info(
                        "the reward function %s failed (%s) and is called again", self._name, error
                    )
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

    def _reward_of_timeout(self) -> float:
        self.timeouts += 1
        text = f"the reward function {self._name} took more than {self.timeout_seconds:g} s"
        if self.timeout_reward is None:
            raise RewardFailed(text, code="reward_timeout")
        log.warning("%s: the reward is %g (time-out %d)", text, self.timeout_reward, self.timeouts)
        return self.timeout_reward


def gsm8k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: Any,
    **fields: Any,
) -> float:
    """Return 1.0 if the completion's final number equals the answer's, else 0.0.

    A text's final number is the first one after its last ``####``; else the one that `math-verify
    <https://github.com/huggingface/Math-Verify>`_ finds: behind "final answer is", in the last
    ``\\boxed{}``, behind "answer", or the last one. Signs, decimals, fractions, LaTeX, ``$``, ``%``
    and commas between thousands are read, and values compared to 6 decimals, so 18, 18.00, $18 and
    ``\\frac{36}{2}`` are equal. A text without a number is never right. No text makes it raise;
    ConfigError if math-verify is not installed.

    In a main thread math-verify stops itself after 3 seconds for a text or a comparison. In
    another thread, or beside a timer of the process, it cannot: :class:`AsyncRewardWrapper` bounds
    its time.
    """
    limit = _limit()
    right, said = (_final_number(text, limit) for text in (answer, completions))
    return float(math_verify_package().verify(right, said, timeout_seconds=limit))


@cache
def math_verify_package() -> Any:
    try:
        import math_verify
    except ImportError:
        raise ConfigError(
            "gsm8k_reward_fn needs the package math-verify: pip install math-verify, or "
            '"any-agent-rl[serve]"'
        ) from None
    # Its warnings have whole texts.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _limit() -> int | None:
    """Return the seconds after which math-verify stops itself, by SIGALRM; None where it cannot."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return None if any(signal.getitimer(signal.ITIMER_REAL)) else MATH_SECONDS


def _final_number(text: Any, limit: int | None) -> list[Any]:
    """Return what math-verify reads as a text's final number; [] without one."""
    if isinstance(text, float):
        # Without an exponent, which it does not read.
        text = f"{Decimal(str(text)):f}"
    plain = str(text)[-_LONGEST:].replace("\\$", "").replace("\u2212", "-")
    whole = _DEBT.sub("-", plain)
    parts = [whole]
    _, marked, after = whole.rpartition("####")
    if marked and (words := after.split()):
        # A line's first word; LaTeX is read between dollars.
        latex = f"${words[0]}$" if "\\" in words[0] else ""
        parts = [words[0], latex, after.lstrip().partition("\n")[0], whole]
    for part in parts:
        read: list[Any] = math_verify_package().parse(
            part, fallback_mode="no_fallback", parsing_timeout=limit
        )
        if read:
            return read
    return []
