"""A GPU that is asked for and not there is told at once, by a process that has no torch."""

from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("name", ["train.device", "engine.device"])
def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    without_gpu(monkeypatch)
    with fails_with(ConfigError, f"{name}=cuda", "no GPU"):
        engines.require_devices(settings(f"{name}=cuda"), trains=True)
    engines.require_devices(settings(f"{name}=auto"), trains=True)
    engines.require_devices(settings(f"{name}=cpu"), trains=True)


def test_what_is_not_started_here_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    engines.require_devices(settings("train.device=cuda"), trains=False)
    elsewhere = settings("engine.device=cuda", "engine.urls=[http://10.0.0.1:3, http://10.0.0.2:3]")
    engines.require_devices(elsewhere, trains=True)
    one = ("engine.urls=[http://10.0.0.1:3]", "server.ranks=1")
    plugins = settings("engine.kind=complete", *one)
    engines.require_devices(plugins, trains=True)


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


def test_elsewhere_than_on_linux_torch_is_to_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert engines.sees_gpu(tmp_path)


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


def test_each_engine_has_gpus_of_its_own_and_the_trainer_the_first_ones() -> None:
    two = settings(*SGLANG, "engine.gpus=2")
    dealt = engines.assign_gpus(two, NAMES, engines=2, trains=True)
    assert dealt.engines == (("1", "2"), ("3", "4"))
    assert dealt.trainer == ("0",)
    assert dealt.sharing == "none"
    assert engines.assign_gpus(two, NAMES, engines=2, trains=False).trainer is None


def test_where_none_is_left_the_trainer_shares_the_engines() -> None:
    dealt = engines.assign_gpus(settings(*SGLANG), NAMES[:2], engines=2, trains=True)
    assert dealt.engines == (("0",), ("1",))
    assert dealt.sharing == "some"
    alone = engines.assign_gpus(settings(*SGLANG), NAMES[:1], engines=1, trains=True)
    assert (alone.trainer, alone.sharing) == (None, "all")
    # A script trains in the process that starts them, and takes the first.
    assert (
        engines.assign_gpus(settings(*SGLANG), NAMES[:3], engines=2, trains=False).sharing == "none"
    )


def test_too_few_gpus_are_told_by_number() -> None:
    with fails_with(ConfigError, "engine.gpus=2", "6 GPUs", "are 5"):
        engines.assign_gpus(settings(*SGLANG, "engine.gpus=2"), NAMES, engines=3, trains=True)


def test_our_own_engines_share_what_there_is() -> None:
    dealt = engines.assign_gpus(settings(), NAMES[:2], engines=3, trains=True)
    assert dealt.engines == (("0",), ("1",), ("0",))
    assert dealt.sharing == "some"


@pytest.mark.parametrize(
    "given", ["engine.device=cpu", "engine.urls=http://10.0.0.1:3,http://10.0.0.2:3"]
)
def test_engines_that_need_none_leave_them_to_the_trainer(given: str) -> None:
    dealt = engines.assign_gpus(settings(given), NAMES, engines=1, trains=True)
    assert dealt == engines.GpuAssignment((None,), None)
    assert engines.assign_gpus(settings(), (), engines=1, trains=True) == dealt


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


def test_several_gpus_for_an_engine_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    with fails_with(ConfigError, "engine.gpus=2", "no GPU"):
        engines.require_devices(settings("engine.kind=sglang", "engine.gpus=2"), trains=False)
