"""Many that work on the event loop at once leave it to others in between."""

from __future__ import annotations

import asyncio

from proxy_ext.calls.call_manager import LoopTurns


async def test_one_waiting_task_goes_on_in_each_round_of_the_loop() -> None:
    loop, turns = asyncio.get_running_loop(), LoopTurns()
    number, rounds = 0, list[int]()

    def count_round() -> None:
        nonlocal number
        number += 1
        if len(rounds) < 20:
            loop.call_soon(count_round)

    async def work() -> None:
        await turns.wait()
        rounds.append(number)

    loop.call_soon(count_round)
    await asyncio.gather(*(work() for _ in range(20)))
    assert rounds == sorted(set(rounds))


async def test_a_lone_task_does_not_wait_for_its_turn() -> None:
    turns = LoopTurns()
    for _ in range(3):
        try:
            turns.wait().send(None)
        except StopIteration:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        else:
            raise AssertionError("it waited")


async def test_a_cancelled_task_holds_no_other_up() -> None:
    turns = LoopTurns()
    done = list[int]()

    async def work(k: int) -> None:
        await turns.wait()
        done.append(k)

    tasks = [asyncio.create_task(work(k)) for k in range(5)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert done == [0, 3, 4]
    async with asyncio.timeout(60):
        await turns.wait()
