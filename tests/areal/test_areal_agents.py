"""AReaL's agents run as they are written there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from any_agent.chat import load_chat_format
from any_agent.workflow import context, resolve_workflow, tensors_of
from any_agent.workflow.agent_service import AgentService
from tests.areal.calculator import calculator
from tests.areal.training import DOCUMENTS, settings, tasks, trained
from tests.proxy_ext.proxy_lab import config_for, running_proxy

ADMIN = "operator-secret"
TASK = {"messages": [{"role": "user", "content": "What is 2 and 3?"}], "answer": "5"}


def test_the_guides_script_trains_an_agent(tiny_model_dir: Path, tmp_path: Path) -> None:
    with calculator(tiny_model_dir) as engine:
        given = settings(tiny_model_dir, engine.url, tasks(tmp_path / "tasks.jsonl", 8), tmp_path)
        more = ["rollout.agent.mode=inline", "workflow=my_module.MyAgent"]
        run = trained(sys.executable, DOCUMENTS / "train.py", [*given, *more], cwd=tmp_path)
    assert [step["step"] for step in run.steps] == [1, 2]
    assert [step["sessions"] for step in run.steps] == [4, 4]
    assert [step["reward"] for step in run.steps] == [0.5, 0.5]
    assert run.steps[0]["stats"]["rollout/reward"] == 0.5


async def test_the_synchronous_agent_runs_in_processes(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(DOCUMENTS))
    config = config_for(tmp_path, f"server.admin_key={ADMIN}")
    chat = load_chat_format(str(tiny_model_dir), enable_thinking=False)
    with calculator(tiny_model_dir) as engine:
        async with running_proxy(config, chat, engine_url=engine.url) as proxy:
            service = AgentService(proxy.url, ADMIN, mode="subproc", max_workers=2)
            workflow = resolve_workflow("my_module.MySyncAgent", group_size=2, agents=service)
            episode = await workflow.arun_episode(None, TASK)
            await context.close_clients()
    assert episode is not None
    got = tensors_of(episode)
    assert sorted(got["rewards"].tolist()) == [0.0, 1.0]
    assert got["loss_mask"].sum(1).tolist() == [2, 2], "a digit and the end of the turn"
