"""`AsyncRewardWrapper`: runs a reward function in a process pool; a reward function for GSM8K."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from any_agent.config import SECRET_VARIABLES
from any_agent.errors import AnyAgentError
from any_agent.runtime.worker_pool import (
    WorkerCrashed,
    WorkerFailed,
    WorkerPool,
    WorkerTimeout,
    pack,
    shared_pool,
)

log = logging.getLogger(__name__)

_NUMBER = re.compile(
    r"(?<![A-Za-z0-9])(?<![0-9]\.)"  # not inside a word or another number
    r"(?P<sign>(?<![)\]])[-+\u2212])?\$?(?P<inner>(?<=\$)-)?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)"
    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9]))?(?:/(?P<under>[0-9]+(?![0-9.])))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_LATEX = re.compile(r"\\[!,;: ]|\\(?=\$)|[{}](?=,)|(?<=,)\}")
_LONGEST = 100_000  # characters at the end of an answer in which its final number is sought


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

    A text's final number is the first one after its last ``####``; else the last one in its last
    ``\\boxed{}``; else the last one in it. Signs, decimals, fractions (``3/4``), exponents, ``$``
    and commas between thousands are read; numbers are compared by value, so 18, 18.0 and $18 are
    equal. A text without a number is never right. No text makes it raise.
    """
    number = final_number(completions)
    return float(number is not None and number == final_number(answer))


def final_number(text: Any) -> Fraction | None:
    """Return a text's final number as :func:`gsm8k_reward_fn` reads it; None without one."""
    whole = str(text)[-_LONGEST:]
    marked = whole.rpartition("####")
    if marked[1] and (found := _numbers(marked[2])):
        return found[0]
    for part in (_boxed(whole), whole):
        if part is not None and (found := _numbers(part)):
            return found[-1]
    return None


def _numbers(text: str) -> list[Fraction]:
    """Return a text's numbers in order, except those with thousands of digits."""
    plain = _FRACTION.sub(r" \1/\2 ", _LATEX.sub("", text))
    found = []
    for match in _NUMBER.finditer(plain):
        try:
            value = Fraction(match["digits"].replace(",", ""))
            value *= Fraction(10) ** int(match["exponent"] or 0)
            value /= int(match["under"] or 1)
        except (ValueError, ZeroDivisionError):
            continue
        minus = (match["sign"] or "") in ("-", "\u2212") or match["inner"]
        found.append(-value if minus else value)
    return found


def _boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{``, up to its closing brace or the end."""
    _, found, rest = text.rpartition("\\boxed{")
    if not found:
        return None
    depth = 1
    for at, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return rest[:at]
    return rest
