"""One machine's parts: which, in which order, with what; what becomes of them; and the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import yaml
from safetensors.numpy import save_file

from any_agent.errors import ConfigError, StartupError
from any_agent.launcher import Node, registry_monitor, trial
from any_agent.launcher import node as node_module
from any_agent.launcher.process import Command, SupervisedProcess
from any_agent.launcher.trial import SavedWeights, TrialWeights, check_model, trial_dir
from any_agent.rundir.registry import RegistryEntry, publish
from any_agent.runtime.ports import reserve
from tests.support.errors import fails_with
from tests.support.launcher.children import is_alive, until
from tests.support.launcher.stand_ins import Lab, checked_until, flag, kill_and_wait

pytestmark = pytest.mark.service

ENGINES, RANKS = ["engine-0", "engine-1"], ["rank-0", "rank-1"]


def test_parts_start_in_order_each_with_what_it_needs(lab: Lab) -> None:
    with lab.node("server.admin_key=a-secret-key", "engine.key=another-key") as node:
        assert list(node.parts) == [*ENGINES, *RANKS, "router", "trainer"]
        # The service is not kept waiting for its trainer.
        checked_until(node, lambda: node.parts["trainer"].state == "ready")
        starts = lab.names("starts")
        assert starts[:2] == ["engine", "engine"]
        assert sorted(starts[2:4]) == RANKS
        assert starts[4:] == ["router", "trainer"]
        events = {name: lab.start_of(node, name) for name in node.parts}
        settings = str(node.dir.path / "resolved.yaml")
        for rank, (engine, proxy) in enumerate(zip(ENGINES, RANKS, strict=True)):
            e, p = events[engine], events[proxy]
            assert flag(e, "--host") == flag(p, "--host") == "127.0.0.1"
            assert (flag(e, "--model-path"), flag(e, "--weight-version")) == (
                str(lab.home / "model"),
                "0",
            )
            assert flag(p, "--engine-url") == f"http://127.0.0.1:{flag(e, '--port')}"
            assert (flag(p, "--rank"), flag(p, "--public-url")) == (str(rank), node.url)
            assert (flag(p, "--config"), flag(p, "--engine-wait")) == (settings, "0")
            assert "--training" in p["argv"]
            assert e["variables"] == []
            assert p["variables"] == ["ANY_AGENT_ENGINE__KEY", "ANY_AGENT_SERVER__ADMIN_KEY"]
        router, trainer = events["router"], events["trainer"]
        assert f"http://127.0.0.1:{flag(router, '--port')}" == node.url
        assert flag(router, "--public-url") == node.url
        assert trainer["argv"] == ["--config", settings, "--host", "127.0.0.1"]
        assert node.dir.url.read_text() == f"{node.url}\n"
        assert node.dir.url.stat().st_mode & 0o777 == 0o600
        assert router["variables"] == ["ANY_AGENT_SERVER__ADMIN_KEY"], "it calls no engine"
        own = ["ANY_AGENT_ENGINE__KEY", "ANY_AGENT_SHARED_GPUS"]
        assert trainer["variables"] == own, "it has the run's own key"
        for secret in ("a-secret-key", "another-key"):
            assert secret not in Path(settings).read_text() + str(events)
        assert sorted(p.name for p in node.dir.logs.iterdir()) == sorted(
            f"{name}.log" for name in node.parts
        )
    told = [(line.split("  ")[0].strip(), line.split("  ")[-1].strip()) for line in lab.said]
    assert told[:2] == [
        ("run", str(node.dir.path)),
        ("model", f"{lab.home / 'model'}, version 0"),
    ]
    assert [name for name, _ in sorted(told[2:4])] == ["engine 0", "engine 1"]
    assert all(words.startswith("ready at http://127.0.0.1:") for _, words in told[2:4])
    assert sorted(told[4:6]) == [("rank 0", "ready"), ("rank 1", "ready")]
    router_is_ready, loads, trainer_is_ready = told[6:]
    assert router_is_ready == ("router", f"ready at {node.url}")
    assert loads[0] == "trainer" and "429" in loads[1]
    assert trainer_is_ready == ("trainer", "ready")


def test_parts_end_in_the_order_that_keeps_most(lab: Lab) -> None:
    with lab.node() as node:
        processes = [psutil.Process(part.pid) for part in node.parts.values()]
        checked_until(node, lambda: len(lab.events("starts")) == 6)
    ended = lab.names("ends")
    assert ended[:2] == ["trainer", "router"]
    assert sorted(ended[2:4]) == RANKS
    assert ended[4:] == ["engine", "engine"]
    assert not [process for process in processes if is_alive(process)]


@pytest.mark.parametrize("name", ["engine-1", "rank-0", "router", "trainer"])
def test_a_killed_part_comes_back_in_its_place_and_the_others_never_notice(
    lab: Lab, name: str
) -> None:
    with lab.node() as node:
        before = {part.name: part.pid for part in node.parts.values()}
        checked_until(node, lambda: node.parts["trainer"].state == "ready")
        first = lab.start_of(node, name)
        for _ in range(2):
            kill_and_wait(node, name)
            checked_until(node, lambda: len(lab.names("starts")) == 6 + node.parts[name].restarts)
            again = lab.start_of(node, name)
            if name != "trainer":
                assert flag(again, "--port") == flag(first, "--port")
            if name == "rank-0":
                # Both may have been killed: it waits for its engine.
                assert flag(again, "--engine-wait") == f"{node.config.engine.update_wait:g}"
        after = {part.name: part.pid for part in node.parts.values()}
    assert {n for n in before if before[n] != after[n]} == {name}
    label = name.replace("-", " ")
    assert lab.said[-4:] == 2 * [
        f"{label:<9} ended by SIGKILL; starting it again",
        f"{label:<9} ready again",
    ]


def test_an_engine_that_comes_back_gets_the_newest_weights(lab: Lab) -> None:
    with lab.node() as node:
        for name in ("v00000009", "v00000010", ".partial-v00000011"):
            (node.dir.weights / name).mkdir()
        kill_and_wait(node, "engine-0")
        start = lab.start_of(node, "engine-0")
        assert flag(start, "--weight-version") == "10"
        assert flag(start, "--model-path") == str(node.dir.weights / "v00000010")


def test_engines_log_as_the_settings_say(lab: Lab) -> None:
    with lab.node("log_level=warning", "log_format=json") as node:
        for engine in ENGINES:
            start = lab.start_of(node, engine)
            flags = [flag(start, f"--log-{what}") for what in ("level", "format", "part")]
            assert flags == ["warning", "json", engine]


def test_without_training_the_given_weights_are_served_for_good(lab: Lab, tmp_path: Path) -> None:
    weights = TrialWeights(tmp_path / "checkpoint", 5)
    with lab.node(train=False, weights=weights) as node:
        assert list(node.parts) == [*ENGINES, *RANKS, "router"]
        (node.dir.weights / "v00000010").mkdir()
        kill_and_wait(node, "engine-0")
        for engine in ENGINES:
            start = lab.start_of(node, engine)
            assert flag(start, "--weight-version") == "5"
            assert flag(start, "--model-path") == str(tmp_path / "checkpoint")
        assert "--training" not in lab.start_of(node, "rank-0")["argv"]
        assert not node.check()
        # A trial is bound to its settings by training.
        assert not (node.dir.path / "config.yaml").exists()


def test_engines_of_others_are_used_and_left_alone(lab: Lab) -> None:
    with lab.node("engine.urls=http://10.0.0.1:1,http://10.0.0.2:2") as node:
        assert list(node.parts) == [*RANKS, "router", "trainer"]
        found = [flag(lab.start_of(node, rank), "--engine-url") for rank in RANKS]
    assert found == ["http://10.0.0.1:1", "http://10.0.0.2:2"]
    assert "engine" not in lab.names("starts")


def test_any_number_of_ranks(lab: Lab) -> None:
    with lab.node("server.ranks=1") as node:
        assert list(node.parts) == ["engine-0", "rank-0", "router", "trainer"]


def test_a_host_of_ipv6(lab: Lab) -> None:
    try:
        reserve("::1", 0).close()
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    with lab.node("server.host=::1", "server.ranks=1") as node:
        start = lab.start_of(node, "router")
        assert node.url == f"http://[::1]:{flag(start, '--port')}"
        kill_and_wait(node, "router")


def test_a_finished_trainer_is_left_alone(lab: Lab) -> None:
    with lab.node("server.ranks=1") as node:
        assert not node.check()
        checked_until(node, lambda: node.parts["trainer"].state == "ready")
        os.kill(node.parts["trainer"].pid, signal.SIGUSR1)
        node.watch(until_trained=True)
        assert node.check()
        assert (node.parts["trainer"].state, node.parts["trainer"].restarts) == ("ended", 0)
        # The rest goes on serving.
        kill_and_wait(node, "rank-0")
        assert node.check()
    assert f"trainer   done; checkpoints in {node.dir.checkpoints}" in lab.said
    assert not [line for line in lab.said if line.startswith("serving ")]


def test_a_service_that_stays_after_its_training_says_so_once(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Left(Exception):
        """The person has read it, and some more looks have passed."""

    with lab.node("server.ranks=1") as node:
        checked_until(node, lambda: node.parts["trainer"].state == "ready")
        os.kill(node.parts["trainer"].pid, signal.SIGUSR1)
        later = 0

        def sleep(seconds: float) -> None:
            nonlocal later
            later += any(line.startswith("trainer   done") for line in lab.said)
            if later == 3:
                raise Left
            time.sleep(seconds)

        clock = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        monkeypatch.setattr(node_module, "time", clock)
        with pytest.raises(Left):
            node.watch()
    (told,) = (line for line in lab.said if line.startswith("serving "))
    assert f"{node.url}/v1" in told and "Ctrl-C" in told


def test_a_run_that_is_trained_says_so(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = SavedWeights(lab.home / "step-00000005", 7, 5)
    monkeypatch.setattr("any_agent.launcher.node.latest_weights", lambda _: saved)
    line = (
        "run       train.steps=5 are done, so train sessions are refused: raise train.steps, or "
        f"choose another trial; checkpoint {saved.path}"
    )
    for steps, said in ((6, False), (5, True)):
        with lab.node("server.ranks=1", f"train.steps={steps}"):
            assert (line in lab.said) is said
    # Before any part is started.
    first = lab.said.index(lab.said[0], 1)
    assert lab.said[first + 1] == line


@pytest.mark.parametrize(("code", "kind"), [(1, StartupError), (2, ConfigError)])
@pytest.mark.parametrize("name", ["engine", "rank-1", "router", "trainer"])
def test_a_part_that_cannot_start_is_named_and_nothing_is_left(
    lab: Lab, name: str, code: int, kind: type[Exception]
) -> None:
    lab.refuse(name, code)
    with pytest.raises(kind, match=name.replace("-", " ")) as raised, lab.node() as node:
        node.watch()
    assert f"    these are the last words of {name}\n  log: {lab.home}" in str(raised.value)
    for pid in [event["pid"] for event in lab.events("starts")]:
        assert not psutil.pid_exists(pid) or not is_alive(psutil.Process(pid))
    # A start without a service does not bind the trial to its settings.
    bound = (trial_dir(lab.config()).path / "config.yaml").exists()
    assert bound == (name == "trainer")


@pytest.mark.parametrize("name", ["rank-1", "router", "trainer"])
def test_a_part_that_hangs_is_killed_and_comes_back(
    lab: Lab, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_monitor, "SILENCE_TIMEOUT", 4.0)
    seconds = registry_monitor.ROUTER_TIMEOUT if name == "router" else 4
    with lab.node() as node:
        checked_until(node, lambda: node.parts["trainer"].state == "ready")
        part = node.parts[name]
        os.kill(part.pid, signal.SIGSTOP)
        checked_until(node, lambda: part.restarts and part.state == "ready")
    label = f"{name.replace('-', ' '):<9}"
    assert [line for line in lab.said if line.startswith(label)][-3:] == [
        f"{label} has sent no heartbeat for {seconds:g} s; killing it",
        f"{label} ended by SIGKILL; starting it again",
        f"{label} ready again",
    ]


def test_a_part_that_fails_later_ends_the_service(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="rank 0 cannot run as") as raised, lab.node() as node:
        lab.refuse("rank-0", 2)
        os.kill(node.parts["rank-0"].pid, signal.SIGKILL)
        node.watch()
    assert "these are the last words of rank-0" in str(raised.value)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_that_is_renamed_ends_the_service_and_nothing_starts_again(
    lab: Lab, replaced: bool
) -> None:
    """A rank that started anew in another folder would know nothing of its sessions."""
    with pytest.raises(StartupError) as raised, lab.node() as node:
        pids = {name: part.pid for name, part in node.parts.items()}
        run = node.dir.path
        run.rename(run.with_name("elsewhere"))
        if replaced:
            shutil.copytree(run.with_name("elsewhere"), run)
        os.kill(pids["rank-0"], signal.SIGKILL)
        began = time.monotonic()
        checked_until(node, lambda: False)
    assert time.monotonic() - began < 20
    assert str(run) in raised.value.message
    assert {name: part.pid for name, part in node.parts.items()} == pids
    assert replaced or not run.exists(), "nothing is written where it was"


OUTLIVED = """
import os, sys, time
from pathlib import Path
from any_agent.launcher import Node, NodeOptions
from any_agent.config import load_config

root, model = f"root={sys.argv[1]}/runs", f"model.path={sys.argv[1]}/model"
os.chdir(sys.argv[1])
with Node(load_config(None, [root, model, "server.port=0"], environ={})) as node:
    while node.parts["trainer"].state != "ready":
        node.check()
        time.sleep(0.01)
    print("up", flush=True)
    sys.stdin.read()
"""


def test_nothing_outlives_a_killed_launcher(lab: Lab) -> None:
    repository = Path(__file__).parents[2]
    launcher = subprocess.Popen(
        [sys.executable, "-c", OUTLIVED, str(lab.home)],
        cwd=repository,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None and launcher.stdin is not None
    until(lambda: launcher.stdout.readline().strip() in ("up", ""))  # type: ignore[union-attr]
    children = [psutil.Process(event["pid"]) for event in lab.events("starts")]
    assert len(children) == 6
    launcher.kill()
    launcher.wait()
    launcher.stdin.close()
    launcher.stdout.close()
    try:
        until(lambda: not [child for child in children if is_alive(child)])
    finally:
        for child in filter(is_alive, children):
            child.kill()
    # So its place is free.
    with lab.node():
        pass


def test_a_port_in_use_is_told_before_anything_is_started_and_leaves_no_trial(lab: Lab) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"), lab.node(f"server.port={port}"):
            pass
    assert lab.events("starts") == []
    assert not (lab.home / "runs").exists()


def test_two_services_in_one_run_directory(lab: Lab) -> None:
    with lab.node("server.ranks=1") as node:
        with pytest.raises(StartupError, match="another service is using"), lab.node():
            pass
        # It is refused before it touches anything of the first.
        assert (node.dir.registry / "rank-0.json").exists()
        assert not node.check()


def test_what_an_earlier_start_registered_is_gone(lab: Lab) -> None:
    run = trial_dir(lab.config())
    run.create()
    for name in ("rank-7", "router"):
        publish(run.registry, RegistryEntry(name=name, boot_id="old", url="http://x", pid=1))
    with lab.node("server.ranks=1") as node:
        assert {p.name for p in node.dir.registry.iterdir()} == {"rank-0.json", "router.json"}


def test_only_the_process_itself_can_say_that_it_is_ready(lab: Lab) -> None:
    """By its address it could be its predecessor."""
    node = Node(lab.config())
    node.dir.create()
    process = SupervisedProcess("me", Command(["x"]), lab.home / "log")
    process._popen = subprocess.Popen([sys.executable, "-c", ""])
    process._popen.wait()
    ready = node._registered("me")
    assert not ready(process)
    told = RegistryEntry(name="me", boot_id="b", url="http://127.0.0.1:1", pid=process.pid)
    for wrong in ({"pid": 1}, {"state": "starting"}, {"state": "stopping"}):
        publish(node.dir.registry, told.model_copy(update=wrong))
        assert not ready(process), wrong
    publish(node.dir.registry, told)
    assert ready(process)
    # Nor is that enough, where somebody has to answer.
    assert not node._registered("me", told.url)(process)


def test_a_model_that_is_gone_is_not_needed_for_serving_its_weights(lab: Lab) -> None:
    """Its tokenizer is where the weights are; while it is there, its folder is the safer one."""
    weights = TrialWeights(lab.home / "checkpoint", 5)
    for model, tokenizer in ((lab.home / "model", lab.home / "model"), ("/gone", weights.path)):
        settings = (f"model.path={model}", "server.ranks=1")
        with lab.node(*settings, train=False, weights=weights) as node:
            assert flag(lab.start_of(node, "rank-0"), "--model-path") == str(tokenizer)
    with pytest.raises(ConfigError, match=r"model\.path=/gone is no"), lab.node(settings[0]):
        pass


def test_a_slow_start_says_what_it_waits_for(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "SLOW", 0.0)
    with lab.node() as node:
        logs = node.dir.logs
    waits = [line for line in lab.said if line.startswith("waiting")]
    each = ("engine 0, engine 1", "rank 0, rank 1", "router")
    assert waits == [
        f"waiting   for {names} to be ready (0 s so far; logs in {logs})" for names in each
    ]


def test_the_settings_of_a_start_are_kept(lab: Lab) -> None:
    with lab.node("server.ranks=1", "train.steps=3", "server.admin_key=a-secret-key") as node:
        kept = [yaml.safe_load((node.dir.path / n).read_text()) for n in KEPT]
    assert kept[0] == kept[1]
    assert kept[0]["train"]["steps"] == 3
    assert "admin_key" not in kept[0]["server"]


KEPT = ("config.yaml", "resolved.yaml")


def test_models_that_cannot_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with fails_with(ConfigError, "--model", "model.path"):
        check_model("")
    (tmp_path / "owner" / "empty").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    path, hub = "nothing at this path", "no name on a hub"
    for given, problem in (
        *((each, "no config.json") for each in (str(tmp_path), "owner/empty", "~/owner")),
        *((each, path) for each in ("./nothing", "../nothing", "/nothing/x", "~/nothing", "a/b/c")),
        ("nothing", hub),
    ):
        with pytest.raises(ConfigError) as refused:
            check_model(given)
        assert given in refused.value.message and problem in refused.value.message
    check_model("Qwen/Qwen3-0.6B")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    check_model(str(tmp_path / "mine"))
    check_model("~/mine")


LAUNCHER = """
import signal, sys
import any_agent.launcher.node as node
from any_agent.config import load_config
from any_agent.launcher import shutdown
from any_agent.launcher.process import Command

shutdown.STOP_GRACE = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)
quiet = node.NodeOptions(say=lambda _: None)


class OneChild(node.Node):
    def _start(self):
        self.dir.create()
        command = Command(["impatient"])
        self._add("child", lambda: command, ready=lambda p: "ready" in p.log.read_text())
        self._until_ready()
        print(self.parts["child"].pid, flush=True)


with OneChild(load_config(None, [f"root={sys.argv[1]}"], environ={}), quiet):
    signal.raise_signal(signal.SIGINT)
"""
# Told to end, it presses Ctrl-C in the launcher's place, and goes on.
IMPATIENT = """
import contextlib, os, signal

launcher = os.getppid()


def again(*_):
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ProcessLookupError):
            os.kill(launcher, number)


signal.signal(signal.SIGTERM, again)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_second_interrupt_leaves_no_child(tmp_path: Path) -> None:
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "runs")],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    child = int(done.stdout)
    left = psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE
    if left:
        psutil.Process(child).kill()
    assert not left
    # The first Ctrl-C ends it, after its children, as the one that it is.
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_training_that_cannot_begin_is_refused_before_anything_starts(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = ("train.kl_coef=1", "train.reference_model=/gone")
    with (
        pytest.raises(ConfigError, match=r"train\.reference_model=/gone is no model folder"),
        lab.node(*reference),
    ):
        pass
    index = {"weight_map": {"q_proj.weight": "1.safetensors"}}
    (lab.home / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    lora = ("train.lora.rank=4", "train.lora.target_modules=q_prj")
    with pytest.raises(ConfigError, match=r"no layer named q_prj; it has q_proj"), lab.node(*lora):
        pass
    monkeypatch.setattr(trial, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"any-agent-rl\[lora\]"), lab.node("train.lora.rank=4"):
        pass
    epochs = r"train\.epochs=2 counts passes over a dataset, and there is none"
    with pytest.raises(ConfigError, match=epochs), lab.node("train.epochs=2"):
        pass
    assert not (lab.home / "events").exists()
    # Serving needs none of it.
    unused = (*reference, "train.lora.rank=4", "train.epochs=2", "server.ranks=1")
    with lab.node(*unused, train=False):
        pass


@pytest.mark.parametrize("kept", ["one file", "an index"])
def test_layers_that_no_weight_has_are_refused(tmp_path: Path, kept: str) -> None:
    """By their names alone; an adapter names layers, or their ends."""
    names = ("a.0.q_proj.weight", "a.0.mlp.up_proj.weight", "norm.weight")
    if kept == "an index":
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file({name: np.ones(1) for name in names}, tmp_path / "model.safetensors")
    trial.require_layers(tmp_path, ["q_proj", "mlp.up_proj"])
    trial.require_layers(tmp_path, [])
    with pytest.raises(ConfigError, match=r"no layer named q_prj; it has norm, q_proj, up_proj$"):
        trial.require_layers(tmp_path, ["q_proj", "q_prj"])


@pytest.mark.parametrize("content", [b"", b"\1", b"\5" + bytes(7) + b"[[1]]", b"\xff" * 40])
def test_weights_that_cannot_be_listed_are_left_to_the_trainer(
    tmp_path: Path, content: bytes
) -> None:
    trial.require_layers(tmp_path, ["q_prj"])
    (tmp_path / "model.safetensors").write_bytes(content)
    trial.require_layers(tmp_path, ["q_prj"])
