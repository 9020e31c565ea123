"""How a process sees whether it trains alone, and how a machine's share of them is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from any_agent.config import Config, load_config
from any_agent.demo.models.tiny import make_model
from any_agent.errors import ConfigError
from any_agent.launcher.node_role import NodeRole, TrainingNodes, trainer_arguments
from tests.support.errors import fails_with
from tests.support.trainer.policies import VOCAB, random_rows
from trainer.model import PolicyConfig
from trainer.parallel.__main__ import interface_of
from trainer.policy import Policy
from trainer.world import follows, join, leave, require_processes, started_together

pytestmark = pytest.mark.service


def config_of(*settings: str) -> Config:
    return load_config(None, list(settings), environ={})


def started(rank: int, size: int, here: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(here)}


def test_torchruns_variables_decide_who_leads_and_who_follows() -> None:
    assert (started_together({}), follows({})) == (1, False)
    assert (started_together(started(0, 4, 2)), follows(started(0, 4, 2))) == (4, False)
    assert follows(started(1, 4, 2)) and not follows(started(0, 1, 1))


def test_other_processes_than_configured_are_refused_by_name() -> None:
    require_processes(1, {})
    require_processes(2, started(0, 4, 2))
    require_processes(1, started(0, 4, 2))
    with fails_with(ConfigError, "torchrun --nproc-per-node 2"):
        require_processes(2, {})
    with fails_with(ConfigError, "train.processes=2"):
        require_processes(4, started(0, 4, 2))


def test_more_processes_than_gpus_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with fails_with(ConfigError, "process 4", "train.processes=3"):
        join("cuda")


def test_one_process_is_started_as_ever_and_more_by_one_that_watches_them(tmp_path: Path) -> None:
    settings = tmp_path / "resolved.yaml"
    each = ["--config", str(settings), "--host", "10.0.0.2"]
    place = NodeRole(host="10.0.0.2")
    assert trainer_arguments(config_of(), settings, place) == ["trainer", *each]
    arguments = trainer_arguments(config_of("train.processes=2"), settings, place)
    assert arguments[:3] == ["trainer.parallel", "--processes", "2"]
    assert arguments[arguments.index("--") + 1 :] == each
    nodes = TrainingNodes(count=2, index=1, address="10.0.0.1", port=4711)
    second = NodeRole(host="10.0.0.2", training=nodes)
    arguments = trainer_arguments(config_of(), settings, second)
    assert arguments[0] == "trainer.parallel"
    assert arguments[5:13] == [
        *("--machines", "2", "--machine", "1"),
        *("--address", "10.0.0.1", "--port", "4711"),
    ]


def test_a_wrong_setting_ends_the_group_with_the_exit_code_of_its_process(tmp_path: Path) -> None:
    settings = tmp_path / "wrong.yaml"
    settings.write_text("train: {steps: many}\n")
    arguments = trainer_arguments(config_of("train.processes=2"), settings, NodeRole())
    ended = subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 2, ended.stderr
    assert "train.steps" in ended.stderr


def test_the_loopback_is_an_interface_and_what_no_machine_has_is_none() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.2") is not None
    assert interface_of("192.0.2.1") is None
    assert interface_of("::1") is None


def test_passes_in_bfloat16_move_master_weights_in_float32() -> None:
    """Alone, too: one process has all of what is divided."""
    exact, rough = (
        Policy(
            make_model(VOCAB, 0, hidden_size=32, context=256),
            PolicyConfig(lr=1e-3, threads=1, dtype=dtype),
        )
        for dtype in (None, torch.bfloat16)
    )
    rows = random_rows(5, dtype=torch.float32)
    one, other = (policy.train(rows, 60) for policy in (exact, rough))
    assert other.stats.tokens == one.stats.tokens
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=0.1)
    assert other.grad_norm != one.grad_norm, "it computed in bfloat16"
    pairs = [pair for bucket in rough.buckets(1 << 20) for pair in bucket]
    assert {t.dtype for _, t in pairs} == {torch.float32}
    assert [n for n, _ in pairs] == [n for b in exact.buckets(1 << 20) for n, _ in b]
    leave()
