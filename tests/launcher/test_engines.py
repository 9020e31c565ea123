"""How engines are started: what of the settings reaches which kind, and what is refused before."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from any_agent.auth.engine_key import write_key_file
from any_agent.config import Config, load_config
from any_agent.errors import ConfigError
from any_agent.launcher import Node, NodeOptions, engines
from any_agent.launcher.process import Command, SupervisedProcess
from tests.support.errors import fails_with
from tests.support.launcher.stand_ins import Lab, kill_and_wait

PLACE = ("/weights", 7, "10.0.0.5", 3000, "engine-1")
KEY = Path("/run/engine-key.yaml")


def settings(*overrides: str) -> Config:
    return load_config(None, overrides, environ={})


def option(command: Command, name: str) -> str:
    return command.arguments[command.arguments.index(name) + 1]


@pytest.fixture(autouse=True)
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("sys.platform", "linux")


def has_gpu(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(engines, "sees_gpu", lambda: there)


def test_the_key_is_masked_also_in_the_log_of_an_engine_that_is_never_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes its settings first; and a log that is lost must not keep a ready one out."""
    key, ready = "sk-engine." + 64 * "a", False
    write_key_file(file := tmp_path / "key.yaml", key)
    monkeypatch.setattr(engines, "answers", lambda *_, **__: ready)
    process = SupervisedProcess("engine-0", Command(["any"]), tmp_path / "engine-0.log")
    process.log.write_text(f"server_args=ServerArgs(api_key='{key}')")
    config = settings("engine.kind=sglang", "engine.python=/sgl/bin/python")
    assert not engines.engine_ready(config, "http://127.0.0.1:1", process, key_file=file)
    assert key not in process.log.read_text()
    process.log.unlink()
    ready = True
    assert engines.engine_ready(config, "http://127.0.0.1:1", process, key_file=file)


def test_sglang_is_started_with_the_settings_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch, True)
    config = settings(
        "engine.kind=sglang",
        "engine.python=/sgl/bin/python",
        "engine.gpus=2",
        "engine.arguments=--mem-fraction-static 0.7",
        "engine.environment={A: 1}",
        "engine.context_length=512",
        "model.dtype=bfloat16",
    )
    command = engines.engine_command(config, *PLACE, key_file=KEY, gpus=("2", "3"))
    assert command.python == "/sgl/bin/python"
    assert command.arguments[0] == "sglang.launch_server"
    assert option(command, "--log-level-http") == "warning"
    wanted = {
        "--model-path": "/weights",
        "--weight-version": "7",
        "--host": "10.0.0.5",
        "--port": "3000",
        "--config": str(KEY),
        "--dtype": "bfloat16",
        "--tp-size": "2",
        "--context-length": "512",
        "--max-running-requests": str(config.engine.max_running_requests),
        "--mem-fraction-static": "0.7",
    }
    assert {name: option(command, name) for name in wanted} == wanted
    assert "--incremental-streaming-output" in command.arguments
    assert "--device" not in command.arguments
    assert command.variables == {"A": "1", "CUDA_VISIBLE_DEVICES": "2,3"}


def test_sglang_runs_on_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch, False)
    command = engines.engine_command(settings("engine.kind=sglang"), *PLACE, key_file=KEY)
    assert option(command, "--device") == "cpu"
    assert command.variables == {"SGLANG_USE_CPU_ENGINE": "1"}
    assert command.python is None


def test_the_embedded_engine_is_started_with_the_settings_of_its_node() -> None:
    command = engines.engine_command(settings("engine.environment={A: b}"), *PLACE, key_file=KEY)
    assert command.arguments[0] == "any_agent.engine.embedded"
    assert option(command, "--key-file") == str(KEY)
    assert (option(command, "--log-part"), option(command, "--device")) == ("engine-1", "auto")
    assert command.variables == {"A": "b"}


def test_adapters_are_served_by_the_embedded_engines_that_do_not_train(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    config = settings(f"engine.adapters.mine={folder}")
    command = engines.engine_command(config, *PLACE, key_file=KEY)
    assert option(command, "--adapter") == f"mine={folder}"
    with fails_with(ConfigError, "engine.adapters", "--no-train"):
        engines.require_engines(config, trains=True)
    with fails_with(ConfigError, "engine.adapters.mine", folder):
        engines.require_engines(config)
    folder.mkdir()
    with fails_with(ConfigError, "engine.adapters.mine", "adapter_model.safetensors"):
        engines.require_engines(config)


def test_an_environment_without_sglang_is_named_in_the_error(tmp_path: Path) -> None:
    config = settings("engine.kind=sglang", f"engine.python={sys.executable}")
    with fails_with(ConfigError, sys.executable, "no SGLang"):
        engines.require_engines(config)
    gone = settings("engine.kind=sglang", f"engine.python={tmp_path / 'python'}")
    with fails_with(ConfigError, f"engine.python={tmp_path / 'python'}"):
        engines.require_engines(gone)


def test_gpus_must_divide_the_heads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 12}))
    config = settings("engine.kind=sglang", "engine.gpus=8", f"model.path={tmp_path}")
    with fails_with(ConfigError, "engine.gpus=8", "12 attention heads", "1, 2, 3, 4, 6, 12"):
        engines.require_engines(config)


def test_public_engines_are_refused() -> None:
    with fails_with(ConfigError, "8.8.8.8", "public"):
        engines.require_engines(settings("engine.urls=http://8.8.8.8:30000", "server.ranks=1"))
    engines.require_engines(settings("engine.urls=http://10.0.0.1:30000", "server.ranks=1"))


@pytest.mark.service
def test_a_node_deals_out_its_gpus_and_again_to_one_that_restarts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5")
    with lab.node("server.ranks=2", "engine.environment={ANY_AGENT_SEEN: x}") as node:
        kill_and_wait(node, "engine-1")
        lab_of = {name: lab.start_of(node, name) for name in node.parts}
        assert lab_of["engine-0"]["gpus"] == "4"
        assert lab_of["engine-1"]["gpus"] == "5"
        assert lab_of["trainer"]["gpus"] == "3"
        assert lab_of["rank-0"]["gpus"] == lab_of["router"]["gpus"] == "3,4,5"
        assert lab_of["engine-0"]["variables"] == ["ANY_AGENT_SEEN"]


def test_cuda_without_a_gpu_is_refused_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch, False)
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
    has_gpu(monkeypatch, True)
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


def test_cuda_without_a_gpu_is_refused_before_the_service_starts_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpu(monkeypatch, False)
    (tmp_path / "config.json").write_text("{}")
    root = tmp_path / "runs"
    config = settings(f"root={root}", f"model.path={tmp_path}", "train.device=cuda")
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


def test_settings_that_an_adapter_of_a_shared_engine_cannot_have_are_refused() -> None:
    one, two = "http://127.0.0.1:1/adapters/mine", "http://127.0.0.1:2"
    lora = "train.lora.rank=4"
    engines.require_engines(settings(f"engine.urls={one}", "server.ranks=1", lora), trains=True)
    for words, given in {
        "train.lora.rank": ["server.ranks=1"],
        "update_mode=in_place": ["server.ranks=1", lora, "engine.update_mode=in_place"],
        "weight_sync=tensor": ["server.ranks=1", lora, "engine.weight_sync=tensor"],
        "one kind": ["server.ranks=2", lora, f"engine.urls={one},{two}"],
        "'a b'": ["server.ranks=1", lora, f"engine.urls={two}/adapters/a b"],
    }.items():
        with fails_with(ConfigError, words):
            engines.require_engines(settings(f"engine.urls={one}", *given), trains=True)
