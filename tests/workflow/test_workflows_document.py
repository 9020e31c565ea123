"""The example of docs/how-to/workflows.md runs as it stands, and its errors are the code's."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from any_agent import (
    GRPOConfig,
    MultiTurnWorkflow,
    load_expr_config,
    load_hf_tokenizer,
    stats_tracker,
)
from any_agent.workflow import RolloutWorkflow, resolve_workflow
from any_agent.workflow.tensor_checks import PER_ROW, PER_TOKEN, REQUIRED

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "workflows.md").read_text()


async def test_the_documented_workflow_collects_its_groups(
    tiny_model_dir: Path, engine_url: str
) -> None:
    code = re.findall(r"```python\n(.*?)```", TEXT, re.S)[0]
    names: dict[str, Any] = {"__name__": "arithmetic"}
    exec(compile(code, "docs/how-to/workflows.md", "exec"), names)
    stats_tracker.export_all()
    groups = await asyncio.to_thread(names["main"], engine_url, str(tiny_model_dir))
    assert len(groups) == 4
    for group in groups:
        assert len(group["rewards"]) == 4
        assert group["loss_mask"].any(dim=1).all()
        assert set(group["versions"][group["loss_mask"] == 1].tolist()) == {0}
    rewards = torch.cat([group["rewards"] for group in groups])
    assert stats_tracker.export_all() == {
        "rollout/reward": rewards.mean().item(),
        "rollout/reward__count": 16,
        "rollout/accepted": 1.0,
        "rollout/accepted__count": 16,
    }


def test_the_documented_calls_of_a_trainer_make_their_workflows(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, call, reward, ready, *_ = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    (tmp_path / "arithmetic.py").write_text(own)
    (tmp_path / "my_reward.py").write_text(reward)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[RolloutWorkflow] = []

    def train(workflow: Any, workflow_kwargs: dict[str, Any]) -> None:
        made.append(resolve_workflow(workflow, workflow_kwargs))

    fake = SimpleNamespace(train=train)
    config, _ = load_expr_config([f"model.path={tiny_model_dir}"], GRPOConfig)
    names = {"trainer": fake, "config": config, "load_hf_tokenizer": load_hf_tokenizer}
    for code in (call, ready):
        exec(compile(code, "docs/how-to/workflows.md", "exec"), dict(names))
    assert type(made[0]).__name__ == "Arithmetic"
    assert isinstance(made[1], MultiTurnWorkflow)
    for name in ("arithmetic", "my_reward"):
        del sys.modules[name]


def test_the_document_names_every_field_of_the_tensors() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\[.*?\]) \| (\w+) \| (required)?", TEXT, re.M)
    fields = {**dict.fromkeys(PER_TOKEN, "[B, T]"), **dict.fromkeys(PER_ROW, "[B]")}
    assert {name: shape for name, shape, *_ in rows} == fields
    types = {name: kind.__name__.rstrip("_") for name, kind in {**PER_TOKEN, **PER_ROW}.items()}
    assert {name: kind for name, _, kind, _ in rows} == types
    assert [name for name, *_, required in rows if required] == list(REQUIRED)
