from __future__ import annotations

import asyncio

from any_agent import stats_tracker, workflow_context


def test_outside_of_an_episode_it_is_nobodys() -> None:
    context = workflow_context.get()
    assert (context.task_id, context.is_eval, context.version) == (None, False, -1)
    assert workflow_context.stat_scope() == "rollout"


async def test_episodes_side_by_side_never_see_each_others() -> None:
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


async def test_it_can_be_set_for_the_rest_of_a_task() -> None:
    async def episode() -> int | str | None:
        workflow_context.set(workflow_context.WorkflowContext(task_id="t"))
        return workflow_context.get().task_id

    assert await asyncio.create_task(episode()) == "t"
    assert workflow_context.get().task_id is None


async def test_figures_go_where_they_belong() -> None:
    stats_tracker.export_all()
    for is_eval, reward in ((False, 1.0), (True, 0.25), (False, 0.0)):
        with workflow_context.use(workflow_context.WorkflowContext(is_eval=is_eval)):
            stats_tracker.get(workflow_context.stat_scope()).scalar(reward=reward)
    assert stats_tracker.export_all() == {
        "rollout/reward": 0.5,
        "rollout/reward__count": 2,
        "eval-rollout/reward": 0.25,
        "eval-rollout/reward__count": 1,
    }


async def test_http_clients_are_shared_until_they_are_closed() -> None:
    client = await workflow_context.get_httpx_client()
    session = await workflow_context.get_aiohttp_session()
    assert await workflow_context.get_httpx_client() is client
    assert await workflow_context.get_aiohttp_session() is session
    await workflow_context.close_clients()
    assert client.is_closed and session.closed
    assert await workflow_context.get_httpx_client() is not client
    assert await workflow_context.get_aiohttp_session() is not session
    await workflow_context.close_clients()
    await workflow_context.close_clients()


def test_each_event_loop_has_its_own() -> None:
    async def ask() -> object:
        client = await workflow_context.get_httpx_client()
        await workflow_context.close_clients()
        return client

    assert asyncio.run(ask()) is not asyncio.run(ask())


async def test_a_client_that_was_closed_by_mistake_is_replaced() -> None:
    (await workflow_context.get_aiohttp_session()).detach()
    await (await workflow_context.get_httpx_client()).aclose()
    assert not (await workflow_context.get_aiohttp_session()).closed
    assert not (await workflow_context.get_httpx_client()).is_closed
    await workflow_context.close_clients()
