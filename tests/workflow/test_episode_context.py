from __future__ import annotations

import asyncio
from typing import Any

from any_agent import workflow_context


async def test_episodes_side_by_side_never_see_each_others_context() -> None:
    meet = asyncio.Barrier(3)

    async def helper() -> object:
        return workflow_context.get().task_id

    async def episode(k: int) -> list[object]:
        mine = workflow_context.WorkflowContext(task_id=k, is_eval=k == 1)
        with workflow_context.use(mine):
            await meet.wait()
            inner = await asyncio.create_task(helper())
            thread = await asyncio.to_thread(lambda: workflow_context.get().task_id)
            seen = [workflow_context.get().task_id, inner, thread, workflow_context.stat_scope()]
        assert workflow_context.get().task_id is None
        return seen

    assert await asyncio.gather(*map(episode, range(3))) == [
        [0, 0, 0, "rollout"],
        [1, 1, 1, "eval-rollout"],
        [2, 2, 2, "rollout"],
    ]


async def test_a_context_can_be_set_for_the_rest_of_a_task() -> None:
    async def episode() -> int | str | None:
        workflow_context.set(workflow_context.WorkflowContext(task_id="t"))
        return workflow_context.get().task_id

    assert await asyncio.create_task(episode()) == "t"
    assert workflow_context.get().task_id is None


async def test_http_clients_are_shared_until_they_are_closed() -> None:
    async def clients() -> tuple[Any, Any]:
        http = await workflow_context.get_httpx_client()
        return http, await workflow_context.get_aiohttp_session()

    client, session = await clients()
    assert await clients() == (client, session)
    await workflow_context.close_clients()
    assert client.is_closed and session.closed
    again, other = await clients()
    assert again is not client and other is not session
    # One that was closed by mistake is replaced.
    await again.aclose()
    other.detach()
    client, session = await clients()
    assert not client.is_closed and not session.closed
    for _ in range(2):
        await workflow_context.close_clients()
