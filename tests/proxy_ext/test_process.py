"""``python -m proxy_ext``: what it says when it cannot start."""

from __future__ import annotations

import asyncio
import socket
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


def test_a_port_in_use(tiny_model_dir: Path, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ended = run(write_config(tmp_path, tiny_model_dir), "--port", port)
    assert ended.returncode == 2
    assert f"127.0.0.1:{port}" in ended.stderr
    assert "server.port" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    ended = run(write_config(tmp_path, tmp_path / "nothing"), "--port", "0")
    assert ended.returncode == 2
    assert str(tmp_path / "nothing") in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_template_that_cannot_be_rendered(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model_dir.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    template = model / "chat_template.jinja"
    assert template.is_file()
    template.write_text("{{ raise_exception('broken on purpose') }}")
    ended = run(write_config(tmp_path, model), "--port", "0")
    assert ended.returncode == 2
    assert "broken on purpose" in ended.stderr
    assert "template" in ended.stderr
    assert "Traceback" not in ended.stderr.replace("litellm", "")


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"trian": {"lr": 1}}, "unknown key trian: did you mean train?"),
        ({"server": {"host": "0.0.0.0"}}, "server.admin_key"),
    ],
)
def test_a_bad_configuration_ends_with_2_and_no_traceback(
    tmp_path: Path, section: dict[str, object], says: str
) -> None:
    # Settings in the environment were resolved by whoever wrote the file.
    ended = run(write_config(tmp_path, tmp_path, **section), "--port", "0", ANY_AGENT_TRIAL="no")
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_other_machines_are_not_served_without_a_key(tmp_path: Path) -> None:
    ended = run(write_config(tmp_path, tmp_path), "--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 2
    assert "server.admin_key" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_grader_that_is_not_there(tiny_model_dir: Path, tmp_path: Path) -> None:
    sessions = {"late_reward": "grade", "grader": "no_such_module.grade"}
    ended = run(write_config(tmp_path, tiny_model_dir, sessions=sessions), "--port", "0")
    assert ended.returncode == 2
    assert "sessions.grader=no_such_module.grade" in ended.stderr
    assert "No module named 'no_such_module'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_engine_that_is_not_there(tiny_model_dir: Path, tmp_path: Path) -> None:
    ended = run(write_config(tmp_path, tiny_model_dir), "--port", "0")
    assert ended.returncode == 1
    assert "http://127.0.0.1:1" in ended.stderr
    assert "engine.urls" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_engine_in_public_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    arguments = ("--port", "0", "--engine-url", "http://8.8.8.8:30000")
    ended = run(write_config(tmp_path, tiny_model_dir), *arguments)
    assert ended.returncode == 2
    assert "public address 8.8.8.8" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_an_engine_with_another_model_is_refused(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    scripted = ScriptedEngine()
    scripted.vocabulary = 99
    async with scripted.serve() as url:
        config = write_config(tmp_path, tiny_model_dir)
        ended = await asyncio.to_thread(run, config, "--port", "0", "--engine-url", url)
    assert ended.returncode == 2
    assert f"the engine at {url}" in ended.stderr
    assert "knows fewer than" in ended.stderr
    assert "Traceback" not in ended.stderr
