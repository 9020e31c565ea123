"""The live service that the documents' code runs against: two ranks, a trainer, a taught model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from any_agent.auth.engine_key import read_key_file

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT, TRIAL, USER = "my-model", "2025-10-23-run-1", "username"
"""The names that the proposal's last phase loads the trained model by."""
_LIMIT, _ANSWER = 900.0, 120.0
"""Seconds: of a script or a command, less than its test has, and of one answer."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running service, and the folder that it was started in."""

    url: str
    model: Path
    folder: Path

    @property
    def run(self) -> Path:
        """The trial's folder."""
        return self.folder / "runs" / USER / EXPERIMENT / TRIAL

    @property
    def engines(self) -> list[str]:
        """The engines' URLs, one per rank."""
        entries = sorted((self.run / "registry").glob("rank-*.json"))
        return [json.loads(entry.read_text())["engine_url"] for entry in entries]

    @property
    def engine_key(self) -> str:
        """The key that the engines require."""
        return read_key_file(self.run / "engine-key.yaml")

    def sessions(self, **query: Any) -> list[dict[str, Any]]:
        """The service's sessions, newest first."""
        answer = httpx.get(f"{self.url}/rl/v1/sessions", params=query, timeout=_ANSWER)
        assert answer.status_code == 200, answer.text
        return list(answer.json())

    def session(self, session_id: str) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/rl/v1/sessions/{session_id}", timeout=_ANSWER)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


def settings(model: Path) -> list[str]:
    """The command line of a service that trains on whatever sessions come."""
    given: dict[str, object] = {
        "experiment": EXPERIMENT,
        "trial": TRIAL,
        "user": USER,
        "model.path": model,
        "model.enable_thinking": "false",
        "server.port": 0,
        "server.ranks": 2,
        "sampling.max_new_tokens": 32,
        "sessions.group_size": 8,
        "rollout.batch_size": 8,
        "rollout.max_concurrent": 48,
        "train.steps": 100_000,
        "train.lr": 1e-6,
        "train.checkpoint_every": 1,
    }
    return [f"{name}={value}" for name, value in given.items()]


def run_script(
    python: str | Path,
    code: str,
    folder: Path,
    *arguments: str,
    name: str = "script.py",
    **environ: str,
) -> str:
    """Run code as a user's own script; returns what it printed, fails where it fails."""
    script = folder / name
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(code, encoding="utf-8")
    return run_command([str(python), str(script), *arguments], folder, **environ)


def run_command(command: list[str], folder: Path, **environ: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ANY_AGENT_", "OPENAI_"))}
    path = os.pathsep.join([str(folder), str(ROOT)])
    done = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LIMIT,
    )
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    return said


PYTHON = sys.executable
