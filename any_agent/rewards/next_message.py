"""A grader from what came next: each answer is judged by what a user or a tool said to it."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias

from any_agent.rewards.grader import plain_number

Judge: TypeAlias = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], Any]
"""Takes an interaction of a session's dictionary and the messages that came next; returns a number,
or None for no opinion. It may be a coroutine function."""
CallRewards: TypeAlias = dict[str, dict[str, float]]
"""Rewards by name, by the interaction's id."""

_AT_ONCE = 8  # judgements of one session that a coroutine function makes side by side


def next_message(
    judge: Judge, *, name: str = "next_message"
) -> Callable[[Mapping[str, Any]], Coroutine[Any, Any, CallRewards]]:
    """Return a grader (`sessions.grader`) that rewards each answer by what users or tools said to
    it: the reward ``name``, with its weight in `sessions.reward_weights`.

    Where an answer was continued by messages that differ, its reward is the mean over them. An
    answer that nothing followed, or of which the judge has no opinion, gets none.
    """

    async def grade(session: Mapping[str, Any]) -> CallRewards:
        free = asyncio.Semaphore(_AT_ONCE)

        async def judged(
            call: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
        ) -> float | None:
            async with free:
                value = judge(call, messages)
                value = await value if inspect.isawaitable(value) else value
            return None if value is None else plain_number(value)

        pairs = [(call, said) for call in session["interactions"] for said in call["next_messages"]]
        values = await asyncio.gather(*(judged(*pair) for pair in pairs))
        given: defaultdict[str, list[float]] = defaultdict(list)
        for (call, _), value in zip(pairs, values, strict=True):
            if value is not None:
                given[call["id"]].append(value)
        return {id: {name: math.fsum(each) / len(each)} for id, each in given.items()}

    return grade
