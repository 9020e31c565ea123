"""Waiting for an update or for a dead engine: bounded in number and time, one question for all."""

from __future__ import annotations

import asyncio

from any_agent.engine.pause_gate import Outage, PauseGate
from any_agent.errors import EngineUnavailable
from tests.support.errors import fails_with
from tests.support.waiting import until


async def test_the_number_of_waiting_calls_is_bounded() -> None:
    gate = PauseGate("a weight update", max_wait=60, max_waiting=2)
    gate.close()
    calls = [asyncio.create_task(gate.wait_open()) for _ in range(2)]
    await asyncio.sleep(0)
    with fails_with(EngineUnavailable, "too many calls"):
        await gate.wait_open()
    # Who leaves makes room.
    calls[0].cancel()
    await asyncio.wait([calls[0]])
    late = asyncio.create_task(gate.wait_open())
    await asyncio.sleep(0)
    assert not late.done()
    gate.open()
    await asyncio.gather(calls[1], late)


class Asked:
    """An engine that is asked whether it serves."""

    def __init__(self) -> None:
        self.questions = 0
        self.up = False
        self.answer = asyncio.Event()
        self.answer.set()

    async def __call__(self) -> bool:
        self.questions += 1
        await self.answer.wait()
        return self.up


async def test_one_question_to_the_engine_serves_all_waiting_calls() -> None:
    engine = Asked()
    outage = Outage(engine, max_wait=60)
    engine.answer.clear()
    for _ in range(50):
        outage.begin()
    calls = [asyncio.create_task(outage.gate.wait_open()) for _ in range(50)]
    await until(lambda: engine.questions)
    assert engine.questions == 1
    engine.answer.set()
    # A further question comes only after the answer to the one before.
    await until(lambda: engine.questions >= 3)
    assert not any(call.done() for call in calls)
    engine.up = True
    await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert outage.gate.is_open
    # Nobody asks any more.
    await until(lambda: len(asyncio.all_tasks()) == 1)


async def test_calls_that_ask_at_the_same_time_share_a_question() -> None:
    engine = Asked()
    engine.up = True
    outage = Outage(engine, max_wait=60)
    engine.answer.clear()
    leaves, *stay = [asyncio.create_task(outage.is_over()) for _ in range(10)]
    await until(lambda: engine.questions)
    # Who leaves does not take the answer from the others.
    leaves.cancel()
    await asyncio.wait([leaves])
    engine.answer.set()
    assert await asyncio.gather(*stay) == [True] * 9
    assert engine.questions == 1
    assert await outage.is_over()
    assert engine.questions == 2


async def test_closing_an_outage_ends_its_questions_to_the_engine() -> None:
    engine = Asked()
    outage = Outage(engine, max_wait=60)
    engine.answer.clear()
    outage.begin()
    await until(lambda: engine.questions)
    await asyncio.wait_for(outage.close(), 60)
    assert len(asyncio.all_tasks()) == 1
