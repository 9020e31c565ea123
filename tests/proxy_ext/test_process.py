"""``python -m proxy_ext``: what it says when it cannot start."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.real_parts import environment, write_config
from tests.support.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.service


def run(config: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A start that is expected to fail, before LiteLLM is imported."""
    command = [sys.executable, "-m", "proxy_ext", "--config", str(config)]
    return subprocess.run(
        [*command, "--engine-url", "http://127.0.0.1:1", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(**env),
    )


def ends_with(ended: subprocess.CompletedProcess[str], *names: str, status: int = 2) -> None:
    assert ended.returncode == status, ended.stderr
    assert "Traceback" not in ended.stderr
    for name in names:
        assert name in ended.stderr


@pytest.mark.parametrize(
    ("sections", "arguments", "names", "status"),
    [
        ({}, "", ["nothing-there"], 2),
        ({"trian": {"lr": 1}}, "", ["unknown key trian: did you mean train?"], 2),
        ({"server": {"host": "0.0.0.0"}}, "", ["server.admin_key"], 2),
        ({}, "--host 0.0.0.0", ["server.admin_key"], 2),
        (
            {"sessions": {"late_reward": "grade", "grader": "no_such_module.grade"}},
            "",
            ["sessions.grader=no_such_module.grade", "No module named 'no_such_module'"],
            2,
        ),
        ({}, "--engine-url http://8.8.8.8:30000", ["public address 8.8.8.8"], 2),
        ({}, "", ["http://127.0.0.1:1", "engine.urls"], 1),
    ],
)
def test_a_setting_that_prevents_the_start_is_named(
    tiny_model_dir: Path,
    tmp_path: Path,
    sections: dict[str, object],
    arguments: str,
    names: list[str],
    status: int,
) -> None:
    model = tmp_path / "nothing-there" if "nothing-there" in names else tiny_model_dir
    config = write_config(tmp_path, model, **sections)
    # Settings in the environment were resolved by whoever wrote the file.
    ended = run(config, "--port", "0", *arguments.split(), ANY_AGENT_TRIAL="no")
    ends_with(ended, *names, status=status)


async def test_an_engine_with_another_model_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    scripted = ScriptedEngine()
    scripted.vocabulary = 99
    async with scripted.serve() as url:
        config = write_config(tmp_path, tiny_model_dir)
        ended = await asyncio.to_thread(run, config, "--port", "0", "--engine-url", url)
    ends_with(ended, f"the engine at {url}", "knows fewer than")
