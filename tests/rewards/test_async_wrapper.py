"""Reward functions in processes: what they return, and what they do wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from any_agent import AsyncRewardWrapper, gsm8k_reward_fn
from any_agent.errors import ConfigError
from any_agent.rewards import async_wrapper
from any_agent.rewards.async_wrapper import RewardFailed
from any_agent.runtime import worker_pool as workers
from tests.support import reward_functions as functions
from tests.support.errors import fails_with


@pytest.fixture(scope="module", autouse=True)
def _processes() -> Iterator[None]:
    """Starting them takes seconds, so the tests share them."""
    yield
    workers.shared_pool("rewards", 2).close()


async def test_a_reward_function_runs_in_another_process_and_returns_its_value() -> None:
    reward_fn = AsyncRewardWrapper(functions.by_name, max_workers=2)
    assert await reward_fn(result="4", answer="4") == 1.0
    assert await reward_fn("4", answer="5") == 0.0
    elsewhere = AsyncRewardWrapper(functions.pid, max_workers=2)
    pids = set(await asyncio.gather(*(elsewhere() for _ in range(8))))
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2


async def test_a_call_that_takes_too_long_costs_itself_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await AsyncRewardWrapper(functions.pid, max_workers=2)()
    late = AsyncRewardWrapper(functions.hangs, timeout_seconds=0.5, max_workers=2)
    good = AsyncRewardWrapper(functions.by_name, max_workers=2)
    rewards = await asyncio.gather(late(), *(good("4", "4") for _ in range(5)))
    assert rewards == [0.0, 1, 1, 1, 1, 1]
    assert late.timeouts == 1, "it was not tried again"
    assert "hangs took more than 0.5 s" in caplog.text
    strict = AsyncRewardWrapper(
        functions.hangs, timeout_seconds=0.2, max_workers=2, timeout_reward=None
    )
    with fails_with(RewardFailed, "hangs", "0.2 s", code="reward_timeout"):
        await strict()


async def test_a_crash_neither_ends_the_pool_nor_other_calls(tmp_path: Path) -> None:
    once = AsyncRewardWrapper(functions.dies_at_first, max_workers=2)
    assert await once(str(tmp_path / "died")) == 0.5
    dead = AsyncRewardWrapper(functions.dies, max_workers=2, max_retries=1)
    good = AsyncRewardWrapper(functions.by_name, max_workers=2)
    results = await asyncio.gather(dead(), good("4", "4"), good("4", "5"), return_exceptions=True)
    assert isinstance(results[0], RewardFailed)
    assert "dies" in results[0].message
    assert list(results[1:]) == [1.0, 0.0]
    assert await good("4", "4") == 1.0


async def test_an_error_of_a_reward_function_is_told_with_its_trace() -> None:
    with fails_with(
        RewardFailed,
        "raises failed: ZeroDivisionError: nothing to divide by",
        "reward_functions.py",
    ):
        await AsyncRewardWrapper(functions.raises, max_workers=2)()
    with fails_with(RewardFailed, "SystemExit"):
        await AsyncRewardWrapper(functions.leaves, max_workers=2, max_retries=0)()


async def test_a_coroutine_reward_function_runs_in_this_process() -> None:
    async def asks(answer: str) -> float:
        await asyncio.sleep(0)
        return float(answer == "4") + os.getpid()

    assert await AsyncRewardWrapper(asks)("4") == os.getpid() + 1

    async def sleeps() -> float:
        await asyncio.sleep(60)
        return 1.0

    assert await AsyncRewardWrapper(sleeps, timeout_seconds=0.02)() == 0.0


def test_a_reward_function_that_cannot_be_sent_is_refused_at_once() -> None:
    with fails_with(ConfigError, "lambda", "top level of a module"):
        AsyncRewardWrapper(lambda: 1.0)


async def test_cancelling_a_reward_ends_its_call() -> None:
    late = AsyncRewardWrapper(functions.hangs, timeout_seconds=600, max_workers=2)
    tasks = [asyncio.create_task(late()) for _ in range(4)]
    await asyncio.wait(tasks, timeout=0.2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=60)
    assert all(task.cancelled() for task in tasks)
    # The workers are free again.
    good = AsyncRewardWrapper(functions.by_name, timeout_seconds=120, max_workers=2)
    assert await good("4", "4") == 1.0


RIGHT = [
    ("6 + 12 is 18.", "They pay 6 + 12.\n#### 18"),
    ("#### 18 dollars, of 20", "18"),
    ("so \\boxed{18}, as 9 * 2", 18),
    ("\\boxed{\\frac{1}{2}}", "#### 0.5"),
    ("\\boxed{\\$1{,}234}", "#### 1,234"),
    ("It costs $1,234,567.50", 1234567.5),
    ("a debt of -$5", "#### -5"),
    ("x=-5", "-5"),
    ("10-3", 7),
    ("**42**", "42.0"),
    ("#### none, but 7", "7"),
    ("#### 18\n\nQuestion: 5 + 6?", 18.0),
    ("costs \\$5, in all \\$18", "18"),
    ("\u22125", -5),
    (r"\boxed{-\frac{3}{4}}", "-0.75"),
    (r"\boxed{\frac{-3}{4}}", "-0.75"),
    (r"#### -\dfrac{1}{2}", "-1/2"),
    (r"so $x = -\tfrac{5}{2}$", "-2.5"),
    (r"\boxed{\frac{3}{4}}", "3/4"),
    (r"\boxed{\frac{36}{2}}", "#### 18"),
    ("0.00001", 1e-05),
]
WRONG = [
    ("18 or 19", "18"),
    ("no number", "also none"),
    ("5", "-5"),
    ("#### 17, not 18", "18"),
    ("\\boxed{17} of 18", "18"),
    ("1/0", "0"),
    ("9" * 5000, "9"),
    ("1e999999999", "2"),
    ("\\boxed{{{{", ""),
    ("a debt of -$5", "5"),
    (None, None),
    ("\ud800 \x00 #### ####", 1),
    ("v2beta", "3"),
    (r"\boxed{-\frac{3}{4}}", "0.75"),
    (r"\boxed{-\frac{6}{2}}", "3"),
    (r"#### -\dfrac{1}{2}", "1/2"),
    ("1", 1e-05),
]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [(*pair, 1.0) for pair in RIGHT] + [(*pair, 0.0) for pair in WRONG],
)
def test_the_final_number_of_an_answer_decides_its_reward(
    completion: Any, answer: Any, reward: float
) -> None:
    got = gsm8k_reward_fn("q", completion, [1], [2], answer=answer, question="more fields")
    assert (got, type(got)) == (reward, float)


def test_math_answers_are_compared_in_threads_and_beside_a_timer() -> None:
    """math-verify's own limit is a signal: for a main thread, and in place of another timer."""
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(gsm8k_reward_fn, "", r"\boxed{6/2}", [], [], 3).result(60) == 1.0
    before = signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        assert gsm8k_reward_fn("", r"\boxed{6/2}", [], [], "3") == 1.0
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 400
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_an_answer_that_computes_for_hours_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_wrapper, "MATH_SECONDS", 1)
    before = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        assert gsm8k_reward_fn("", "$9^{9^{9^9}}$", [], [], "3") == 0.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_without_math_verify_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async_wrapper.math_verify_package.cache_clear()
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with fails_with(ConfigError, "math-verify"):
        gsm8k_reward_fn("", "3", [], [], "3")


async def test_the_ready_function_runs_in_a_process() -> None:
    """By position and by keyword, as ready workflows and hand-written ones call it."""
    wrapped = AsyncRewardWrapper(gsm8k_reward_fn)
    assert await wrapped("q", "18", [1], [2], **{"answer": "#### 18", "messages": []}) == 1.0
