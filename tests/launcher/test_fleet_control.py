"""Ranks that are added to and drained from a running node, by commands in its folder."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from any_agent.cli.main import main
from any_agent.errors import ConfigError
from any_agent.launcher import Node, fleet_control
from any_agent.launcher.node_role import NodeRole
from any_agent.rundir.checksums import write_manifest
from any_agent.rundir.fleet import Fleet, load_fleet, save_fleet
from tests.support.errors import fails_with
from tests.support.launcher.children import is_alive
from tests.support.launcher.stand_ins import Lab, checked_until, flag

pytestmark = pytest.mark.service

DONE = {"retired": True, "unfinished": 0, "replayable": False}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_control, "LEAVE", 0.1)
    monkeypatch.setattr(fleet_control, "HEARTBEAT", 0.1)


@pytest.fixture
def ranks(lab: Lab, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """The command in another thread, while the node is looked after in this one."""

    def run(node: Node, *words: str) -> tuple[int, str]:
        out: list[int] = []
        arguments = ["ranks", *words, f"root={node.config.root}", f"user={node.config.user}"]
        thread = threading.Thread(target=lambda: out.append(main(arguments)))
        capsys.readouterr()
        thread.start()
        checked_until(node, lambda: not thread.is_alive())
        text = capsys.readouterr()
        return out[0], (text.out + text.err).strip()

    return run


def fleet_of(node: Node) -> Fleet:
    found = load_fleet(node.dir.fleet)
    assert found is not None
    return found


def look_after(node: Node) -> None:
    """For as long as parts need to tell what they have to tell."""
    end = time.monotonic() + 0.6
    checked_until(node, lambda: time.monotonic() > end)


def is_ready(node: Node, name: str) -> bool:
    return name in node.parts and node.parts[name].state == "ready"


def saved_ranks(node: Node) -> int:
    return int(yaml.safe_load((node.dir.path / "config.yaml").read_text())["server"]["ranks"])


def test_a_rank_is_added_and_serves_with_the_present_weights(lab: Lab, ranks: Any) -> None:
    with lab.node() as node:
        checked_until(node, lambda: node.parts["trainer"].state == "ready")
        (weights := node.dir.weights / "v00000003").mkdir()
        (weights / "config.json").write_text("{}")
        write_manifest(weights)
        (node.dir.state).write_text('{"highest_version": 4}')
        code, said = ranks(node, "add")
        assert (code, said.partition(";")[0]) == (0, "rank 2 is started")
        assert fleet_of(node).state(2) == "joining"
        checked_until(node, lambda: is_ready(node, "rank-2"))
        engine, proxy = lab.start_of(node, "engine-2"), lab.start_of(node, "rank-2")
        assert flag(engine, "--weight-version") == "3"
        assert flag(proxy, "--engine-url") == f"http://127.0.0.1:{flag(engine, '--port')}"
        assert "--training" in proxy["argv"]
        # Version 4 comes meanwhile, to the ranks that the trainer knows.
        for fields in ({"version": 3, "led": True}, {"version": 4, "led": False}):
            lab.enter("rank-2", **fields)
            look_after(node)
            assert fleet_of(node).state(2) == "joining", fields
        lab.enter("rank-2", version=4, led=True)
        checked_until(node, lambda: fleet_of(node).state(2) == "serving")
        assert saved_ranks(node) == 3, "a start without a file goes on with it"
    events = (node.dir.audit / "ranks.jsonl").read_text().splitlines()
    assert [(e["event"], e["rank"]) for e in map(json.loads, events)] == [("ranks add", 2)]


def test_without_a_trainer_a_new_rank_serves_what_the_others_serve(lab: Lab, ranks: Any) -> None:
    with lab.node(train=False) as node:
        for name in ("rank-0", "rank-1"):
            lab.enter(name, version=7)
        lab.enter("rank-2", version=6)
        assert ranks(node, "add")[0] == 0
        checked_until(node, lambda: is_ready(node, "rank-2"))
        look_after(node)
        assert fleet_of(node).state(2) == "joining"
        lab.enter("rank-2", version=7)
        checked_until(node, lambda: fleet_of(node).state(2) == "serving")


def test_a_rank_is_drained_and_ends(lab: Lab, ranks: Any) -> None:
    with lab.node() as node:
        processes = [psutil.Process(node.parts[n].pid) for n in ("engine-0", "rank-0")]
        code, said = ranks(node, "drain", "0")
        assert code == 0, said
        assert (fleet_of(node).serving, fleet_of(node).others) == ((1,), {0: "draining"})
        # It has not heard of it, then it has sessions.
        for fields in ({"retired": False, "unfinished": 0}, {"retired": True, "unfinished": 2}):
            lab.enter("rank-0", replayable=False, **fields)
            look_after(node)
            assert fleet_of(node).state(0) == "draining"
        lab.enter("rank-0", retired=True, unfinished=0, replayable=True)
        checked_until(node, lambda: "engine-0" not in node.parts)
        assert fleet_of(node).state(0) == "drained"
        assert [is_alive(process) for process in processes] == [False, True]
        lab.enter("rank-0", **DONE)
        checked_until(node, lambda: "rank-0" not in node.parts)
        assert fleet_of(node) == Fleet.of(2).with_state(0, "draining").with_state(0, None)
        assert not any(map(is_alive, processes))
        assert not (node.dir.registry / "rank-0.json").exists()
        assert saved_ranks(node) == 1
        assert {part.name for part in node.parts.values() if part.state != "ready"} <= {"trainer"}


def test_a_drained_rank_needs_no_engine_of_its_own(lab: Lab) -> None:
    config = lab.config()
    with lab.node() as node:
        path = node.dir.fleet
    save_fleet(path, Fleet.of(2).with_state(0, "draining").with_state(0, "drained"))
    with lab.node("server.ranks=1") as node:
        assert list(node.parts) == ["engine-1", "rank-0", "rank-1", "router", "trainer"]
        engine = lab.start_of(node, "engine-1")
        for rank in ("rank-0", "rank-1"):
            url = flag(lab.start_of(node, rank), "--engine-url")
            assert url == f"http://127.0.0.1:{flag(engine, '--port')}"
    assert config.server.ranks == 2


def test_a_change_of_the_fleet_that_cannot_be_made_changes_nothing(lab: Lab, ranks: Any) -> None:
    with lab.node() as node:
        assert ranks(node, "drain", "0")[0] == 0
        before = (fleet_of(node), list(node.parts))
        for rank, why in (
            ("5", "there is no rank 5; the ranks are 0, 1"),
            ("0", "rank 0 drains already"),
            ("1", "rank 1 is the last one that serves"),
        ):
            code, said = ranks(node, "drain", rank)
            assert (code, said.partition(":")[0]) == (1, "error")
            assert why in said
            assert (fleet_of(node), list(node.parts)) == before
            assert list(node.dir.fleet_commands.iterdir()) == []


def test_a_request_that_is_still_being_written_is_left_alone(lab: Lab, ranks: Any) -> None:
    with lab.node() as node:
        checked_until(node, lambda: node.parts["trainer"].state == "ready")
        asked, _ = fleet_control.exchange_paths(node.dir, "half")
        half = asked.with_name(f".partial-{asked.name}")
        half.write_text("{")
        assert ranks(node, "drain", "0")[0] == 0
        assert half.exists()


def test_a_rank_that_cannot_start_ends_nothing_else(lab: Lab, ranks: Any) -> None:
    with lab.node() as node:
        before = {name: part.pid for name, part in node.parts.items()}
        lab.refuse("rank-2", ConfigError.exit_code)
        assert ranks(node, "add")[0] == 0
        checked_until(node, lambda: fleet_of(node).state(2) is None)
        checked_until(node, lambda: "engine-2" not in node.parts)
        assert {name: part.pid for name, part in node.parts.items()} == before
        assert any("these are the last words of rank-2" in line for line in lab.said)
        (lab.home / "rank-2.exit").unlink()
        lab.enter("rank-2", led=True)
        assert ranks(node, "add")[0] == 0
        checked_until(node, lambda: fleet_of(node).state(2) == "serving")


def test_a_rank_that_joins_may_be_given_up(lab: Lab, ranks: Any) -> None:
    with lab.node() as node:
        assert ranks(node, "add")[0] == 0
        code, said = ranks(node, "drain", "2")
        assert code == 0, said
        checked_until(node, lambda: len(node.parts) == 6)
        assert fleet_of(node) == Fleet.of(2)


def test_a_restart_with_fewer_ranks_drains_the_others(lab: Lab) -> None:
    with lab.node("server.ranks=3"):
        pass
    with lab.node("server.ranks=1") as node:
        assert (fleet_of(node).serving, sorted(fleet_of(node).others)) == ((0,), [1, 2])
        assert {"engine-1", "rank-1", "engine-2", "rank-2"} <= node.parts.keys()
        for name in ("rank-1", "rank-2"):
            lab.enter(name, **DONE)
        checked_until(node, lambda: list(node.parts) == ["engine-0", "rank-0", "router", "trainer"])
        assert fleet_of(node).ranks == (0,)


def test_a_trial_from_before_fleets_keeps_its_ranks(lab: Lab) -> None:
    with lab.node("server.ranks=2") as node:
        pass
    node.dir.fleet.unlink()
    with lab.node("server.ranks=1") as node:
        assert fleet_of(node).others == {1: "draining"}


def test_engines_that_run_already_cannot_be_added_to(lab: Lab, ranks: Any) -> None:
    urls = "engine.urls=[http://127.0.0.1:1,http://127.0.0.1:2]"
    with lab.node(urls, "engine.weight_sync=disk") as node:
        code, said = ranks(node, "add")
        assert code == 1
        assert "add the new rank's to it, raise server.ranks" in said
        assert fleet_of(node) == Fleet.of(2)
        assert ranks(node, "drain", "0")[0] == 0
        lab.enter("rank-0", **DONE)
        checked_until(node, lambda: "rank-0" not in node.parts)
        saved = yaml.safe_load((node.dir.path / "config.yaml").read_text())
        assert (saved["server"]["ranks"], saved["engine"]["urls"]) == (1, ["http://127.0.0.1:2"])
    with lab.node("engine.urls=[http://127.0.0.1:2]", "server.ranks=1") as node:
        assert flag(lab.start_of(node, "rank-1"), "--engine-url") == "http://127.0.0.1:2"


def test_a_start_that_drains_ranks_without_their_engines_is_refused(lab: Lab) -> None:
    with lab.node("server.ranks=2"):
        pass
    with (
        fails_with(ConfigError, "engine.urls", "ranks drain"),
        lab.node("engine.urls=[http://127.0.0.1:2]", "server.ranks=1"),
    ):
        pass


def test_a_slurm_job_refuses_other_ranks(lab: Lab, ranks: Any) -> None:
    with lab.node(place=NodeRole(ranks=(0, 1))) as node:
        code, said = ranks(node, "drain", "0")
        assert code == 1
        assert "the ranks of a Slurm job are those of its nodes" in said
    with (
        fails_with(ConfigError, "Slurm", "to 3 "),
        lab.node("server.ranks=3", place=NodeRole(ranks=(0, 1, 2))),
    ):
        pass


def test_each_rank_is_listed_with_its_state(lab: Lab, ranks: Any) -> None:
    with lab.node() as node:
        lab.enter("rank-1", version=3, load={"open": 4, "calls": 2}, unfinished=9)
        entry = node.dir.registry / "rank-1.json"
        checked_until(node, lambda: '"unfinished": 9' in entry.read_text())
        lines = [line.split() for line in ranks(node, "list")[1].splitlines()]
        assert lines[2][:6] == ["1", "serving", "3", "4", "2", "9"]
        shown = json.loads(ranks(node, "list", "--json")[1])
        assert [row["state"] for row in shown] == ["serving", "serving"]


def test_without_a_service_ranks_are_not_changed(
    lab: Lab, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["ranks", "list", f"root={tmp_path / 'nowhere'}"]) == 1
    assert "there is no service of a trial at" in capsys.readouterr().err
    with lab.node() as node:
        own = [f"root={node.config.root}", f"user={node.config.user}"]
    for words in (["add"], ["drain", "1"]):
        assert main(["ranks", *words, *own]) == 1
        assert "its number of ranks is server.ranks at the next start" in capsys.readouterr().err
    assert main(["ranks", "list", *own]) == 0
    assert "no service of this trial runs now" in capsys.readouterr().out
    assert os.listdir(node.dir.fleet_commands) == []
