"""One machine's parts: addresses, the model's path, and an end that nothing interrupts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from any_agent.errors import ConfigError
from any_agent.launcher.node import check_model


def test_models_that_cannot_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"set model\.path to a local folder or a hub name"):
        check_model("")
    for path in (str(tmp_path), "./nothing", "../nothing", "nothing", "~/nothing", "a/b/c"):
        with pytest.raises(ConfigError, match=r"is no model folder: it has no config\.json"):
            check_model(path)
    check_model("Qwen/Qwen3-0.6B")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    check_model(str(tmp_path / "mine"))
    check_model("~/mine")


LAUNCHER = """
import signal, sys
import any_agent.launcher.node as node
from any_agent.config import load_config

node._STOP_GRACE = 0.5
signal.signal(signal.SIGINT, signal.default_int_handler)
quiet = node.NodeOptions(say=lambda _: None)


class OneChild(node.Node):
    def _start(self):
        self.dir.create()
        self._add("child", lambda: ["impatient"], ready=lambda p: "ready" in p.log.read_text())
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
