"""Many that work on the event loop at once leave it to others in between."""

from __future__ import annotations

import asyncio

from proxy_ext.calls.call_manager import LoopTurns


async def rounds_of(count: int, turns: LoopTurns) -> list[int]:
    """In which round of the event loop each of so many went on."""
    loop, number, out = asyncio.get_running_loop(), 0, list[int]()

    def count_round() -> None:
        nonlocal number
        number += 1
        ticking = loop.call_soon(count_round) if len(out) < count else None
        assert ticking is not None or len(out) == count

    async def work() -> None:
        await turns.wait()
        out.append(number)

    loop.call_soon(count_round)
    await asyncio.gather(*(work() for _ in range(count)))
    return out


async def test_one_goes_on_in_each_round() -> None:
    rounds = await rounds_of(20, LoopTurns())
    assert rounds == sorted(set(rounds))


async def test_who_is_alone_does_not_wait() -> None:
    turns = LoopTurns()
    for _ in range(3):
        coroutine = turns.wait()
        try:
            coroutine.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("it waited")
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_who_leaves_holds_nobody_up() -> None:
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
