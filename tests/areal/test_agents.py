"""Agents as AReaL's guide writes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from openai import OpenAI

from any_agent.chat import load_chat_format
from any_agent.workflow import context, resolve_workflow, tensors_of
from any_agent.workflow.openai_proxy import AgentService
from tests.support.areal.calculator import calculator
from tests.support.proxy import config_for, running_proxy

ADMIN = "operator-secret"
TASK = {"messages": [{"role": "user", "content": "What is 2 and 3?"}], "answer": "5"}


class BlockingAgent:
    """Blocks, and makes its client as AReaL's guide does: with a key that is none."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        client = OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="DUMMY")
        answer = client.chat.completions.create(model="default", messages=data["messages"])
        return float(data["answer"] in (answer.choices[0].message.content or ""))


async def test_the_synchronous_agent_runs_in_processes(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = config_for(tmp_path, f"server.admin_key={ADMIN}")
    chat = load_chat_format(str(tiny_model_dir), enable_thinking=False)
    with calculator(tiny_model_dir) as engine:
        async with running_proxy(config, chat, engine_url=engine.url) as proxy:
            service = AgentService(proxy.url, ADMIN, mode="subproc", max_workers=2)
            workflow = resolve_workflow(f"{__name__}.BlockingAgent", group_size=2, agents=service)
            episode = await workflow.arun_episode(None, TASK)
            await context.close_clients()
    assert episode is not None
    got = tensors_of(episode)
    assert sorted(got["rewards"].tolist()) == [0.0, 1.0]
    assert got["loss_mask"].sum(1).tolist() == [2, 2], "a digit and the end of the turn"
