"""The clients that are tried, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.environment import ENVIRONMENTS, component, node_with, python_with
from tests.support.e2e.serving import environment

HERE = Path(__file__).parent
_STEP_LIMIT, _END_LIMIT = 300.0, 60.0
"""Seconds."""
# What is on 127.0.0.1 is reached directly, whatever else is asked for fails at once: a client that
# calls home, or fetches something on its way, neither does nor waits.
_NOWHERE = "http://127.0.0.1:9"
APART = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _NOWHERE),
    **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), _NOWHERE),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1"),
}


@dataclass(frozen=True, slots=True)
class Client:
    """A package of agents' authors, at one version."""

    name: str
    """Its environment's, which pins its version, and in the results."""
    title: str
    """In the table."""
    package: str
    script: Path
    """A function for each step; it returns what becomes a JSON object."""
    variables: tuple[tuple[str, str], ...] = ()
    """What its steps need in their environment."""

    @property
    def registry(self) -> str:
        return "npm" if ENVIRONMENTS[self.name].of_npm else "PyPI"

    @property
    def version(self) -> str:
        return ENVIRONMENTS[self.name].version_of(self.package)

    def command(self) -> list[str | Path]:
        """The program that runs the script's steps."""
        if self.registry == "npm":
            node, folder = component("node"), node_with(self.name)
            # Packages are looked for from the script's place upwards.
            (folder / self.script.name).write_bytes(self.script.read_bytes())
            return [node, HERE / "runner.mjs", folder / self.script.name]
        python = python_with(self.name)
        return [python, "-I", HERE / "runner.py", self.script]


class Running:
    """A client's process, which takes one step after another."""

    def __init__(self, client: Client, folder: Path) -> None:
        self._client = client
        self._folder = folder
        self._command = client.command()
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def step(self, name: str, given: Sequence[str], variables: dict[str, str]) -> dict[str, Any]:
        """What it answers; fails where the step raises, ends, or takes too long."""
        process = self._process or self._start()
        assert process.stdin is not None
        asked = {"step": name, "given": given, "variables": variables}
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        try:
            line = self._answers.get(timeout=_STEP_LIMIT)
        except queue.Empty:
            line = ""
        if not line:
            self.close()
        said = (self._folder / "stderr").read_text(errors="replace")[-3000:]
        assert line, f"{name}: no answer\n{said}"
        answer = dict(json.loads(line))
        assert "raised" not in answer, f"{name}: {answer['raised']}\n{said}"
        return answer

    def _start(self) -> subprocess.Popen[str]:
        given = environment(**APART, HOME=str(self._folder), **dict(self._client.variables))
        with open(self._folder / "stderr", "w") as stderr:
            process = self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env={k: v for k, v in given.items() if not k.startswith("PYTHON")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._answers = answers = queue.Queue[str]()
        threading.Thread(target=_pass_on, args=(process, answers), daemon=True).start()
        return process

    def close(self) -> None:
        """It ends by itself when its input does."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                process.stdin.close()
                process.wait(_END_LIMIT)
            process.kill()
            process.wait()


def _pass_on(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(line)
    answers.put("")


@contextlib.contextmanager
def running(client: Client, folder: Path) -> Iterator[Running]:
    """Its process, started by its first step."""
    process = Running(client, folder)
    try:
        yield process
    finally:
        process.close()
