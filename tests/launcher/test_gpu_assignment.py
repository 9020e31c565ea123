"""A GPU that is asked for and not there is told at once, by a process that has no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from any_agent.config import Config, load_config
from any_agent.errors import ConfigError
from any_agent.launcher import Node, NodeOptions, engines
from tests.support.errors import fails_with


@pytest.fixture(autouse=True)
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("sys.platform", "linux")


def settings(*overrides: str) -> Config:
    return load_config(None, overrides, environ={})


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "sees_gpu", lambda: False)


def test_cuda_without_a_gpu_is_refused_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    for name in ("train.device", "engine.device"):
        with fails_with(ConfigError, f"{name}=cuda", "no GPU"):
            engines.require_devices(settings(f"{name}=cuda"), trains=True)
        for device in ("auto", "cpu"):
            engines.require_devices(settings(f"{name}={device}"), trains=True)
    with fails_with(ConfigError, "engine.gpus=2", "no GPU"):
        engines.require_devices(settings("engine.kind=sglang", "engine.gpus=2"), trains=False)
    # What is not started here needs none.
    engines.require_devices(settings("train.device=cuda"), trains=False)
    elsewhere = settings("engine.device=cuda", "engine.urls=[http://10.0.0.1:3, http://10.0.0.2:3]")
    one = ("engine.urls=[http://10.0.0.1:3]", "server.ranks=1")
    for config in (elsewhere, settings("engine.kind=complete", *one)):
        engines.require_devices(config, trains=True)
    monkeypatch.setattr(engines, "sees_gpu", lambda: True)
    engines.require_devices(settings("train.device=cuda", "engine.device=cuda"), trains=True)


def test_a_gpu_is_seen_unless_it_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not engines.sees_gpu(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert engines.sees_gpu(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert engines.sees_gpu(tmp_path)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert not engines.sees_gpu(tmp_path)
        with fails_with(ConfigError, "train.device=cuda", "CUDA_VISIBLE_DEVICES="):
            engines.require_devices(settings("train.device=cuda"), trains=True)
    # Elsewhere than on Linux torch is to judge.
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert engines.sees_gpu(tmp_path / "none")


def test_a_service_tells_it_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu(monkeypatch)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    root, model = tmp_path / "runs", tmp_path / "model"
    config = settings(f"root={root}", f"model.path={model}", "train.device=cuda")
    with fails_with(ConfigError, "train.device=cuda", "no GPU"):
        Node(config, NodeOptions(say=lambda _: None)).__enter__()
    assert not root.exists()


NAMES = ("0", "1", "2", "3", "4")
SGLANG = ("engine.kind=sglang", "engine.device=cuda")


@pytest.mark.parametrize(
    ("given", "gpus", "count", "dealt", "trainer", "sharing"),
    [
        # Each engine has GPUs of its own, and the trainer the first ones.
        ((*SGLANG, "engine.gpus=2"), 5, 2, (("1", "2"), ("3", "4")), ("0",), "none"),
        # Where none is left it shares the engines'.
        (SGLANG, 2, 2, (("0",), ("1",)), None, "some"),
        (SGLANG, 1, 1, (("0",),), None, "all"),
        # Our own engines share what there is.
        ((), 2, 3, (("0",), ("1",), ("0",)), None, "some"),
        # Engines that need none leave all to the trainer.
        (("engine.device=cpu",), 5, 1, (None,), None, "none"),
        (("engine.urls=http://10.0.0.1:3,http://10.0.0.2:3",), 5, 1, (None,), None, "none"),
        ((), 0, 1, (None,), None, "none"),
    ],
)
def test_gpus_are_dealt_to_engines_and_the_trainer(
    given: tuple[str, ...], gpus: int, count: int, dealt: Any, trainer: Any, sharing: str
) -> None:
    found = engines.assign_gpus(settings(*given), NAMES[:gpus], engines=count, trains=True)
    assert (found.engines, found.sharing) == (dealt, sharing)
    if sharing != "some":
        assert found.trainer == trainer


def test_a_script_trains_in_the_process_that_starts_the_engines() -> None:
    alone = engines.assign_gpus(settings(*SGLANG), NAMES[:3], engines=2, trains=False)
    assert (alone.trainer, alone.sharing) == (None, "none")
    with fails_with(ConfigError, "engine.gpus=2", "6 GPUs", "are 5"):
        engines.assign_gpus(settings(*SGLANG, "engine.gpus=2"), NAMES, engines=3, trains=True)


def test_the_visible_gpus_are_told_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engines.visible_gpus(tmp_path) == ()
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert engines.visible_gpus(tmp_path) == ("0", "1"), "as CUDA counts them"
    for told, seen in (("", ()), ("-1", ()), ("3, GPU-a1", ("3", "GPU-a1"))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", told)
        assert engines.visible_gpus(tmp_path) == seen
