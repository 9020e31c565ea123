"""The commands of the README and of the page on plain HTTP work as they are written."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from any_agent import GRPOConfig, load_expr_config
from any_agent.config import Config, load_config
from any_agent.types import Continuation
from tests.support.e2e.live_run import recorded
from tests.support.e2e.serving import Served, environment, serve
from tests.support.ports import own_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs" / "how-to" / "sessions-by-http.md")


def block(name: str, pages: Iterable[Path] = PAGES) -> str:
    """Return the fenced block after the comment ``<!-- test: name -->``."""
    text = "\n".join(page.read_text() for page in pages)
    found = re.findall(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", text, re.S)
    assert len(found) == 1, f"{len(found)} blocks are marked {name}"
    return str(found[0])


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    path = tmp_path_factory.mktemp("readme") / "config.yaml"
    settings = {
        "root": str(path.parent / "runs"),
        "model": {"path": str(tiny_model_dir), "enable_thinking": False},
        "server": {"port": own_port(), "ranks": 1},
        "sampling": {"max_new_tokens": 16},
        "sessions": {"group_size": 2},
        "rollout": {"batch_size": 4, "max_concurrent": 4},
        "train": {"steps": 5},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def config(config_file: Path) -> Config:
    return load_config(config_file, environ={})


@pytest.fixture(scope="module")
def served(config_file: Path) -> Iterator[Served]:
    with serve("--config", str(config_file), cwd=config_file.parent) as service:
        yield service


def test_the_training_commands_take_the_files_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both name trials of their own, and the model that the page's own command makes."""
    text = (ROOT / "README.md").read_text()
    commands = re.findall(r"^python (?:trainer/any_agent_grpo|train)\.py (.*)$", text, re.M)
    monkeypatch.chdir(ROOT)
    trials = []
    for command in commands:
        config, _ = load_expr_config([*shlex.split(command), f"root={tmp_path}"], GRPOConfig)
        assert (config.model.path, config.train.steps, config.train.lr) == ("/tmp/tiny", 10, 1.5e-3)
        trials.append((config.experiment, config.trial))
    assert trials == [("arithmetic", "served"), ("arithmetic", "first")]
    assert "python -m any_agent.demo.model /tmp/tiny --skill sums" in text


def test_the_page_on_training_shows_the_file() -> None:
    page = (ROOT / "docs" / "how-to" / "train.md").read_text()
    (shown,) = re.findall(r"```yaml\n# examples/arithmetic\.yaml\n(.*?)```", page, re.S)
    file = (ROOT / "examples" / "arithmetic.yaml").read_text()
    assert yaml.safe_load(shown) == yaml.safe_load(file)


def run_bash(script: str, url: str, cwd: Path) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env=environment(ANY_AGENT_URL=url),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.smoke
def test_the_curl_block_records_and_rewards_a_continued_session(
    served: Served, config: Config, tmp_path: Path
) -> None:
    out = run_bash(block("curl"), served.url, tmp_path)
    answers = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    rewarded = next(a for a in answers if "reward" in a)
    finalized = next(a for a in answers if a.get("state") == "finalized")
    assert rewarded["session_id"] == finalized["session_id"]
    assert finalized["interactions"] == 2

    session = httpx.get(f"{served.url}/rl/v1/sessions/{finalized['session_id']}").json()
    assert session["state"] in ("finalized", "leased", "trained")
    assert session["interactions"] == 2
    mine = [i for s in recorded(config) for i in s if i.session_id == session["session_id"]]
    assert [i.continuation for i in mine] == [Continuation.ROOT, Continuation.EXACT]


@pytest.mark.parametrize("name", ["http", "client"])
def test_the_python_blocks_end_their_sessions(name: str, served: Served, tmp_path: Path) -> None:
    program = block(name).replace("http://127.0.0.1:8000", served.url)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    sessions = httpx.get(f"{served.url}/rl/v1/sessions").json()
    assert sessions and "open" not in [session["state"] for session in sessions]
    if name == "client":
        attempts = [session["task_id"] for session in sessions]
        assert attempts.count("sum-1-2") == attempts.count("sum-3-4") == 8


@pytest.mark.smoke
def test_ctrl_c_ends_every_process(served: Served) -> None:
    children = served.children
    assert len(children) >= 3, "engine, proxy and trainer"
    assert served.interrupt(timeout=60) == 130
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert "Traceback" not in served.output.read_text()


def test_the_script_of_the_readme_trains_on_a_dataset(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(block("agent"))
    (tmp_path / "train.py").write_text(block("train"))
    item = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "answer": "42"}
    (tmp_path / "sums.jsonl").write_text(json.dumps(item) + "\n")
    settings = [
        *("train_dataset.path=sums.jsonl", "trial=dataset", f"root={tmp_path}/runs"),
        # A model that can do nothing yet: attempts that all fail teach nothing in groups of more.
        *("sessions.group_size=1", "train.steps=1", "server.port=0"),
    ]
    done = subprocess.run(
        [sys.executable, "train.py", "--config", str(config_file), *settings],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^step +1/1 ", done.stdout, re.M), done.stdout
