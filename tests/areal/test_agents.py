"""Agents as AReaL's guide writes them."""

from __future__ import annotations

from pathlib import Path

from any_agent.chat import load_chat_format
from any_agent.workflow import context, resolve_workflow, tensors_of
from any_agent.workflow.openai_proxy import AgentService
from tests.support.areal.calculator import calculator
from tests.support.proxy import config_for, running_proxy

ADMIN = "operator-secret"
TASK = {"messages": [{"role": "user", "content": "What is 2 and 3?"}], "answer": "5"}


async def test_the_synchronous_agent_runs_in_processes(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = config_for(tmp_path, f"server.admin_key={ADMIN}")
    chat = load_chat_format(str(tiny_model_dir), enable_thinking=False)
    with calculator(tiny_model_dir) as engine:
        async with running_proxy(config, chat, engine_url=engine.url) as proxy:
            service = AgentService(proxy.url, ADMIN, mode="subproc", max_workers=2)
            workflow = resolve_workflow(
                "tests.support.areal.agents.BlockingAgent", group_size=2, agents=service
            )
            episode = await workflow.arun_episode(None, TASK)
            await context.close_clients()
    assert episode is not None
    got = tensors_of(episode)
    assert sorted(got["rewards"].tolist()) == [0.0, 1.0]
    assert got["loss_mask"].sum(1).tolist() == [2, 2], "a digit and the end of the turn"
