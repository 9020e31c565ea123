"""One machine's parts: which, in which order, with what; what becomes of them; and the end."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import numpy as np
import psutil
import pytest
import yaml
from safetensors.numpy import save_file

from any_agent.errors import ConfigError, StartupError
from any_agent.launcher import Node, trial
from any_agent.launcher.process import SupervisedProcess
from any_agent.launcher.shutdown import Terminated, terminate
from any_agent.launcher.trial import TrialWeights, check_model, trial_dir
from any_agent.rundir.registry import RegistryEntry, publish
from any_agent.runtime.ports import reserve
from tests.support.errors import fails_with
from tests.support.launcher.children import is_alive, until
from tests.support.launcher.stand_ins import Lab, checked_until, flag, kill_and_wait

pytestmark = pytest.mark.service

ENGINES, RANKS = ["engine-0", "engine-1"], ["rank-0", "rank-1"]


def test_parts_start_in_order_with_what_they_need_and_end_in_another(lab: Lab) -> None:
    with lab.node("server.admin_key=a-secret-key", "engine.key=another-key") as node:
        assert list(node.parts) == [*ENGINES, *RANKS, "router", "trainer"]
        # The service is not kept waiting for its trainer.
        checked_until(node, lambda: node.parts["trainer"].state == "ready")
        starts = lab.names("starts")
        assert starts[:2] == ["engine", "engine"]
        assert sorted(starts[2:4]) == RANKS
        assert starts[4:] == ["router", "trainer"]
        events = {name: lab.start_of(node, name) for name in node.parts}
        pids = [part.pid for part in node.parts.values()]
        settings = str(node.dir.path / "resolved.yaml")
        for rank, (engine, proxy) in enumerate(zip(ENGINES, RANKS, strict=True)):
            e, p = events[engine], events[proxy]
            assert flag(e, "--host") == flag(p, "--host") == "127.0.0.1"
            assert flag(e, "--model-path") == str(lab.home / "model")
            assert flag(e, "--weight-version") == "0"
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
        kept = (node.dir.path / "config.yaml").read_text()
        assert yaml.safe_load(kept) == yaml.safe_load(Path(settings).read_text())
        for secret in ("a-secret-key", "another-key"):
            assert secret not in kept
            assert secret not in Path(settings).read_text() + str(events)
        assert sorted(p.name for p in node.dir.logs.iterdir()) == sorted(
            f"{name}.log" for name in node.parts
        )
    ended = lab.names("ends")
    assert ended[:2] == ["trainer", "router"]
    assert sorted(ended[2:4]) == RANKS
    assert ended[4:] == ["engine", "engine"]
    assert not [pid for pid in pids if psutil.pid_exists(pid) and is_alive(psutil.Process(pid))]


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


def test_a_service_on_an_ipv6_host_has_its_url_in_brackets(lab: Lab) -> None:
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


def test_a_port_in_use_is_told_before_anything_is_started_and_leaves_no_trial(lab: Lab) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"), lab.node(f"server.port={port}"):
            pass
    assert lab.events("starts") == []
    assert not (lab.home / "runs").exists()


def test_a_second_service_in_one_run_directory_is_refused(lab: Lab) -> None:
    with lab.node("server.ranks=1") as node:
        with pytest.raises(StartupError, match="another service is using"), lab.node():
            pass
        # It is refused before it touches anything of the first.
        assert (node.dir.registry / "rank-0.json").exists()
        assert not node.check()


def test_registrations_of_an_earlier_start_are_removed(lab: Lab) -> None:
    run = trial_dir(lab.config())
    run.create()
    for name in ("rank-7", "router"):
        publish(run.registry, RegistryEntry(name=name, boot_id="old", url="http://x", pid=1))
    with lab.node("server.ranks=1") as node:
        assert {p.name for p in node.dir.registry.iterdir()} == {"rank-0.json", "router.json"}


def test_a_model_that_is_gone_is_not_needed_for_serving_its_weights(lab: Lab) -> None:
    """Its tokenizer is where the weights are; while it is there, its folder is the safer one."""
    weights = TrialWeights(lab.home / "checkpoint", 5)
    for model, tokenizer in ((lab.home / "model", lab.home / "model"), ("/gone", weights.path)):
        settings = (f"model.path={model}", "server.ranks=1")
        with lab.node(*settings, train=False, weights=weights) as node:
            assert flag(lab.start_of(node, "rank-0"), "--model-path") == str(tokenizer)
    with pytest.raises(ConfigError, match=r"model\.path=/gone is no"), lab.node(settings[0]):
        pass


def test_models_that_cannot_be_there_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_only_the_process_itself_can_say_that_it_is_ready(lab: Lab) -> None:
    """By its address it could be its predecessor."""
    node = Node(lab.config())
    node.dir.create()
    process = cast(SupervisedProcess, SimpleNamespace(pid=os.getpid()))
    ready = node.registered("me")
    assert not ready(process)
    told = RegistryEntry(name="me", boot_id="b", url="http://127.0.0.1:1", pid=os.getpid())
    for wrong in ({"pid": 1}, {"state": "starting"}, {"state": "stopping"}):
        publish(node.dir.registry, told.model_copy(update=wrong))
        assert not ready(process), wrong
    publish(node.dir.registry, told)
    assert ready(process)
    assert not node.registered("me", told.url)(process), "somebody has to answer"


def test_layers_that_no_weight_has_are_refused(tmp_path: Path) -> None:
    """By their names alone; an adapter names layers, or their ends."""
    file = tmp_path / "model.safetensors"
    trial.require_layers(tmp_path, ["q_prj"])
    # What cannot be listed is left to the trainer.
    for content in (b"", b"\1", b"\5" + bytes(7) + b"[[1]]", b"\xff" * 40):
        file.write_bytes(content)
        trial.require_layers(tmp_path, ["q_prj"])
    names = ("a.0.q_proj.weight", "a.0.mlp.up_proj.weight", "norm.weight")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, file.name)}
    for kept in ("one file", "an index"):
        if kept == "an index":
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
            file.unlink()
        else:
            save_file({name: np.ones(1) for name in names}, file)
        trial.require_layers(tmp_path, ["q_proj", "mlp.up_proj"])
        trial.require_layers(tmp_path, [])
        with fails_with(ConfigError, "no layer named q_prj; it has norm, q_proj, up_proj"):
            trial.require_layers(tmp_path, ["q_proj", "q_prj"])


def test_who_connects_while_the_router_is_away_waits_for_the_next(lab: Lab) -> None:
    with lab.node() as node, ThreadPoolExecutor(4) as pool:
        router, url = node.parts["router"], httpx.URL(node.url)
        os.kill(router.pid, signal.SIGKILL)
        os.waitid(os.P_PID, router.pid, os.WEXITED | os.WNOWAIT)
        waiting = [pool.submit(httpx.get, url, timeout=60) for _ in range(4)]
        # Not refused, though nobody is there.
        socket.create_connection((url.host, url.port), timeout=10).close()
        assert not any(answer.done() for answer in waiting)
        checked_until(node, lambda: router.restarts == 1 and router.state == "ready")
        assert [answer.result(60).status_code for answer in waiting] == [200] * 4


def test_nobody_waits_for_a_router_that_will_not_come(lab: Lab) -> None:
    with lab.node() as node:
        assert httpx.get(node.url).status_code == 200
    with pytest.raises(httpx.ConnectError, match="refused"):
        httpx.get(node.url, timeout=10)


DRAINED, AT_ONCE = 143, 130
"""How a stand-in ends at SIGTERM and at SIGINT."""


def all_started(lab: Lab, node: Node) -> None:
    checked_until(node, lambda: len(lab.events("starts")) == 6)


def codes(lab: Lab) -> dict[str, int]:
    return {event["part"]: event["code"] for event in lab.events("ends")}


def test_at_sigterm_the_router_and_the_trainer_are_told_first_and_engines_last(lab: Lab) -> None:
    with pytest.raises(Terminated) as left, lab.node() as node:
        all_started(lab, node)
        terminate(signal.SIGTERM, None)
    assert left.value.code == 0, "the program has ended well"
    ended = lab.names("ends")
    assert set(ended[:2]) == {"router", "trainer"}
    assert set(ended[2:4]) == {"rank-0", "rank-1"}
    assert set(ended[4:]) == {"engine"}
    assert {codes(lab)[name] for name in ended[:4]} == {DRAINED}


def test_an_interrupt_drains_nothing(lab: Lab) -> None:
    with pytest.raises(KeyboardInterrupt), lab.node() as node:
        all_started(lab, node)
        (node.dir.checkpoints / "latest").write_text("step-00000007\n")
        raise KeyboardInterrupt
    assert {codes(lab)[name] for name in ("router", "rank-0", "rank-1")} == {AT_ONCE}
    assert lab.said[-1] == "service   stopped; the same command goes on from step 7"


def test_a_part_that_does_not_end_is_awaited_only_until_the_deadline(lab: Lab) -> None:
    lab.keep_busy("rank-1")
    with pytest.raises(Terminated), lab.node("server.drain_timeout=2") as node:
        all_started(lab, node)
        began = time.monotonic()
        terminate(signal.SIGTERM, None)
    assert time.monotonic() - began >= 2
    assert lab.said[-1] == "service   stopped; unfinished work was cut off"
    assert lab.names("drains") == ["rank-1"]
    assert codes(lab)["rank-0"] == DRAINED
    assert codes(lab)["rank-1"] == AT_ONCE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_node_at_once(lab: Lab, number: signal.Signals) -> None:
    lab.keep_busy("router")

    def again() -> None:
        until(lambda: lab.names("drains"))
        os.kill(os.getpid(), number)

    other = threading.Thread(target=again)
    with pytest.raises(Terminated), lab.node("server.drain_timeout=100000") as node:
        all_started(lab, node)
        other.start()
        terminate(signal.SIGTERM, None)
    other.join()
    assert codes(lab)["router"] == AT_ONCE
