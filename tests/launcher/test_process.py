"""Children: what they inherit, and that they are ended, or known to be there, for certain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from any_agent.errors import StartupError
from any_agent.launcher.process import Process
from any_agent.rundir import RunDir


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write a module that children can be started as."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


def run(process: Process) -> str:
    """What it prints until it ends."""
    process.start()
    until(lambda: process.poll() is not None)
    return process.log.read_text()


def test_settings_reach_children_as_given_secrets_only(
    module: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANY_AGENT_TRAIN__LR", "5")
    monkeypatch.setenv("ANY_AGENT_SERVER__ADMIN_KEY", "of-the-environment")
    monkeypatch.setenv("OTHER", "stays")
    name = module(
        "tell_environment",
        "import os\nprint(sorted(v for v in os.environ.items()"
        " if v[0].startswith('ANY_AGENT_') or v[0] == 'OTHER'))",
    )
    secrets = {"ANY_AGENT_SERVER__ADMIN_KEY": "given"}
    assert run(Process("bare", [name], tmp_path / "1.log")) == "[('OTHER', 'stays')]\n"
    with_secrets = run(Process("told", [name], tmp_path / "2.log", secrets=secrets))
    assert with_secrets == "[('ANY_AGENT_SERVER__ADMIN_KEY', 'given'), ('OTHER', 'stays')]\n"


LAUNCHER = """
import sys
from pathlib import Path
from any_agent.launcher.process import Process
from any_agent.rundir import RunDir

run = RunDir(Path(sys.argv[1]))
with run.lock() as lock:
    child = Process("child", ["stubborn"], run.path / "child.log", lock=lock)
    child.start()
    child.wait_ready(lambda: "ready" in child.log.read_text(), timeout=20)
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


def test_the_lock_is_held_until_the_last_child_is_gone(
    module: Callable[[str, str], str], tmp_path: Path
) -> None:
    """Also when the launcher was killed: the child may still write into the folder."""
    module("stubborn", STUBBORN)
    folder = RunDir(tmp_path / "run")
    folder.path.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None and launcher.stdin is not None
    child = psutil.Process(int(launcher.stdout.readline()))
    try:
        launcher.kill()
        launcher.wait()
        assert child.is_running()
        with pytest.raises(StartupError, match="another service"), folder.lock():
            pass
    finally:
        child.kill()
        launcher.stdin.close()
        launcher.stdout.close()
    until(lambda: is_free(folder))


def is_free(folder: RunDir) -> bool:
    try:
        with folder.lock():
            return True
    except StartupError:
        return False


def test_a_child_that_does_not_listen_is_killed(
    module: Callable[[str, str], str], tmp_path: Path
) -> None:
    process = Process("child", [module("stubborn", STUBBORN)], tmp_path / "log")
    process.start()
    process.wait_ready(lambda: "ready" in process.log.read_text(), timeout=20)
    process.stop(grace=0.05)
    assert process.poll() == -signal.SIGKILL


def test_nobody_is_signalled_for_a_process_that_was_reaped(
    module: Callable[[str, str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then its number may be another one's."""
    process = Process("child", [module("short", "")], tmp_path / "log")
    assert run(process) == ""
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "killpg", lambda *call: signalled.append(call))
    process.ask_to_stop()
    process.stop(grace=0.01)
    assert signalled == []


def test_the_end_of_a_long_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = Process("child", ["x"], log)
    assert "its log is empty" in process.last_lines()
    log.write_bytes(b"first\n" + b"\xff" * 200_000 + b"\nlast but one\nlast\n")
    said = process.last_lines(2)
    assert said.splitlines() == ["    last but one", "    last", f"  log: {log}"]
