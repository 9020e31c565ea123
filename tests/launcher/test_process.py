"""Children: what they inherit, and that they are ended, or known to be there, for certain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import psutil
import pytest

from any_agent.errors import StartupError
from any_agent.launcher.process import Command, SupervisedProcess
from any_agent.rundir.layout import RunDir
from tests.support.errors import fails_with
from tests.support.launcher.children import is_alive, until

pytestmark = pytest.mark.service


Child: TypeAlias = Callable[..., SupervisedProcess]


@pytest.fixture
def child(module: Callable[[str, str], str], tmp_path: Path) -> Child:
    """One that runs this source; it is not started."""

    def make(source: str, **how: Any) -> SupervisedProcess:
        command = Command([module("of_the_test", source)], **how)
        return SupervisedProcess("child", command, tmp_path / "log")

    return make


def run(process: SupervisedProcess) -> str:
    """What it prints until it ends."""
    process.start()
    until(lambda: process.poll() is not None)
    return process.log.read_text()


def test_settings_reach_children_as_given_secrets_only(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANY_AGENT_TRAIN__LR", "5")
    monkeypatch.setenv("ANY_AGENT_SERVER__ADMIN_KEY", "of-the-environment")
    monkeypatch.setenv("OTHER", "stays")
    source = "import os\nfor name, value in sorted(os.environ.items()):\n"
    source += "    if name.startswith('ANY_AGENT_') or name == 'OTHER': print(name, value)"
    assert run(child(source)) == "OTHER stays\n"
    told = run(child(source, secrets={"ANY_AGENT_SERVER__ADMIN_KEY": "given"}))
    assert told == "OTHER stays\nANY_AGENT_SERVER__ADMIN_KEY given\nOTHER stays\n"


LAUNCHER = """
import sys, time
from pathlib import Path
from any_agent.launcher.process import Command, SupervisedProcess
from any_agent.rundir import RunDir

run = RunDir(Path(sys.argv[1]))
with run.lock() as lock:
    log = run.path / "child.log"
    command = Command(["stubborn"], before=sys.argv[2:])
    child = SupervisedProcess("child", command, log, lock=lock)
    child.start()
    while "ready" not in child.log.read_text():
        time.sleep(0.01)
    print(child.pid, flush=True)
    sys.stdin.read()
"""
STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while True:
    signal.pause()
"""


@contextlib.contextmanager
def left_alone(folder: Path, *before: str) -> Iterator[psutil.Process]:
    """Start a stubborn child, whose launcher is killed at the end of the block."""
    folder.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), *before],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None and launcher.stdin is not None
    child = psutil.Process(int(launcher.stdout.readline()))
    try:
        yield child
    finally:
        launcher.kill()
        launcher.wait()
        launcher.stdin.close()
        launcher.stdout.close()


def is_free(folder: RunDir) -> bool:
    try:
        with folder.lock():
            return True
    except StartupError:
        return False


def test_the_lock_is_held_until_the_last_child_is_gone(
    module: Callable[[str, str], str], tmp_path: Path
) -> None:
    """Also when the launcher was killed: the child may still write into the folder."""
    module("stubborn", STUBBORN)
    folder = RunDir(tmp_path / "run")
    # Only what starts a command on another machine may take its time.
    with left_alone(folder.path, "env") as child:
        pass
    try:
        assert child.is_running()
        with fails_with(StartupError, folder.path, "another service"), folder.lock():
            pass
    finally:
        child.kill()
    until(lambda: is_free(folder))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_child_that_heeds_no_order_ends_with_its_launcher(
    stopped: bool, module: Callable[[str, str], str], tmp_path: Path
) -> None:
    module("stubborn", STUBBORN)
    with left_alone(tmp_path / "run") as child:
        if stopped:
            child.suspend()
    try:
        until(lambda: not is_alive(child))
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def test_a_child_that_does_not_listen_is_killed(child: Child) -> None:
    process = child(STUBBORN)
    process.start()
    until(lambda: "ready" in process.log.read_text())
    process.stop(grace=0.05)
    assert process.poll() == -signal.SIGKILL


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(child.pid, flush=True)
print("ready", flush=True)
sys.stdin.close()
import signal
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_that_a_dead_child_started_are_ended(
    number: signal.Signals, child: Child
) -> None:
    process = child(PARENT)
    process.start()
    until(lambda: "ready" in process.log.read_text())
    grandchild = psutil.Process(int(process.log.read_text().split()[0]))
    try:
        os.kill(process.pid, number)
        until(lambda: process.poll() is not None)
        assert process.poll() == -number
        until(lambda: not is_alive(grandchild))
    finally:
        if is_alive(grandchild):
            grandchild.kill()


RELAY = """#!/usr/bin/env python
import os, signal, time
if os.fork() == 0:
    while True:
        print("beat", flush=True)
        time.sleep(0.05)
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("ours", [True, False])
def test_who_passes_signals_on_has_a_helper_that_outlives_it(ours: bool, tmp_path: Path) -> None:
    """It is to end what runs elsewhere, when the one that was killed cannot."""
    relay = tmp_path / "relay.py"
    relay.write_text(RELAY)
    process = SupervisedProcess(
        "child", Command([], before=[sys.executable, str(relay)]), tmp_path / "log"
    )
    process.start()
    until(lambda: "ready" in process.log.read_text())
    (helper,) = psutil.Process(process.pid).children()
    try:
        if ours:
            process.kill()
        else:
            os.kill(process.pid, signal.SIGKILL)
        until(lambda: process.poll() is not None)
        assert process.poll() == -signal.SIGKILL
        process.stop(grace=0.01)
        heard = process.log.stat().st_size
        until(lambda: process.log.stat().st_size > heard + 10, seconds=20)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            helper.kill()


def test_nobody_is_signalled_for_a_process_that_was_reaped(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then its number may be another one's."""
    process = child("")
    assert run(process) == ""
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *call: signalled.append(call))
    process.terminate()
    process.stop(grace=0.01)
    assert signalled == []


def test_no_library_is_loaded_between_fork_and_exec(
    child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may have held the loader's lock at that moment, and then nobody lets it go."""
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=AssertionError))
    assert run(child("")) == ""


def test_a_child_that_native_code_ends_leaves_its_stack_in_its_log(child: Child) -> None:
    said = run(child("import ctypes\ndef fall() -> None:\n    ctypes.string_at(0)\nfall()"))
    assert "Segmentation fault" in said and "in fall" in said


def test_only_the_end_of_this_starts_log_is_told(child: Child) -> None:
    speaking = child("print('an error of old')")
    run(speaking)
    assert "an error of old" in speaking.last_lines()
    silent, log = child(""), speaking.log
    assert "an error of old" in run(silent), "the log has both"
    assert "an error of old" not in silent.last_lines()
    with log.open("ab") as file:
        file.write(b"first\n" + b"\xff" * 200_000 + b"\nlast but one\nlast\n")
    said = silent.last_lines(2)
    assert said.splitlines() == ["    last but one", "    last", f"  log: {log}"]


def test_a_key_in_a_log_is_masked_and_not_shown(tmp_path: Path) -> None:
    process = SupervisedProcess("x", Command(["any"]), tmp_path / "x.log")
    key = "sk-engine." + 64 * "a"
    process.log.write_text(f"api_key={key}, again {key}\nthe end")
    assert key not in process.last_lines() and "the end" in process.last_lines()
    process.mask(key)
    assert process.log.read_text() == f"api_key={74 * '*'}, again {74 * '*'}\nthe end"
    with process.log.open("a") as log:
        log.write(f"started again with {key}")
    process.mask(key)
    assert key not in process.log.read_text()


def test_a_key_is_masked_wherever_the_parts_of_a_long_log_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in range(8, 40):
        monkeypatch.setattr("any_agent.launcher.process.PART", size)
        process = SupervisedProcess("x", Command(["any"]), tmp_path / "x.log")
        process.log.write_text("it is secret-k, and secret-k, secret-secret-k")
        process.mask("secret-k")
        assert process.log.read_text() == f"it is {8 * '*'}, and {8 * '*'}, secret-{8 * '*'}"
