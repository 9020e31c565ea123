"""The demo as a newcomer runs it, and what can be done with what it leaves."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from any_agent import load_engine
from any_agent.demo.report import PORT
from any_agent.demo.task import items, messages
from any_agent.rundir.layout import RunDir
from tests.support.e2e.serving import CLI, environment, run_cli, serve
from tests.support.e2e.terminal import Terminal, terminal
from tests.support.ports import own_port

STEPS = 8
"""Enough to learn something; `make learn` looks at whole runs over many seeds."""
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(folder: Path) -> tuple[dict[str, Any], str]:
    """The figures and the output of a short demo, kept in ``folder``."""
    figures = folder / "figures.json"
    options = ["--steps", str(STEPS), "--json", str(figures), "--keep", str(folder / "kept")]
    # Behind a company's HTTP proxy it works as well: nothing of it leaves the machine.
    done = run_cli("demo", *options, cwd=folder, HTTP_PROXY=NOWHERE, http_proxy=NOWHERE)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(figures.read_text()), done.stdout


@pytest.mark.gate
def test_one_step_trains_on_what_agents_did(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    # Two ranks are what test_proxy_killed.py serves.
    options = ["--steps", "1", "--ranks", "1", "--json", str(figures)]
    done = run_cli("demo", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(figures.read_text())
    assert (told["steps"], told["ranks"], told["restarts"]) == (1, 1, {})
    assert told["failed_sessions"] == 0, told["errors"]
    assert told["train_sessions"] >= 64
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")] == [
        "1/1"
    ]


def test_the_figures_that_the_demo_prints_are_those_of_the_run(
    demo: tuple[dict[str, Any], str],
) -> None:
    figures, output = demo
    assert (figures["seed"], figures["steps"], figures["ranks"]) == (0, STEPS, 2)
    assert not figures["permuted_rewards"]
    assert figures["failed_sessions"] == 0, figures["errors"]
    assert figures["restarts"] == {}
    assert figures["eval_sessions"] == 4 * len(items(held_out=True))
    assert figures["train_sessions"] >= STEPS * 64
    assert figures["before"] <= 0.5
    assert figures["after"] >= figures["before"] + 0.15
    assert figures["seconds"] > 0 and figures["peak_memory_mib"] > 100
    measures = figures["measures"]
    assert measures["before"]["reward"] < measures["after"]["reward"] <= 1
    assert 1 <= measures["after"]["turns"] < measures["before"]["turns"] <= 2
    assert 1 <= measures["after"]["tokens"] <= 4
    lines = output.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step ")][-1] == f"{STEPS}/{STEPS}"
    (table,) = [line.split() for line in lines if line.startswith("first answer right")]
    assert table[-2:] == [f"{figures['before']:.1%}", f"{figures['after']:.1%}"]
    metrics = Path(figures["run"], "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == list(range(1, STEPS + 1))

    logs = {path.stem for path in Path(figures["run"], "logs").glob("*.log")}
    assert logs == {"engine-0", "engine-1", "rank-0", "rank-1", "router", "trainer"}
    curve = Path(figures["curve"])
    assert curve.parent == Path(figures["run"])
    assert curve.read_bytes().startswith(b"\x89PNG\r\n")
    assert figures["checkpoint"].endswith(f"checkpoints/step-{STEPS:08d}")
    held_out = {item.prompt for item in items(held_out=True)}
    assert len(figures["answers"]) == 3
    for prompt, answer in figures["answers"]:
        assert prompt in held_out
        # Printed on one line, without the white space that an answer may begin with.
        assert f"{prompt}  ->  {' '.join(answer.split())}" in output
    assert f"curve     {curve}\n" in output
    assert f"kept      {figures['checkpoint']}\n" in output


def test_the_checkpoint_of_the_demo_answers_in_this_process(
    demo: tuple[dict[str, Any], str],
) -> None:
    run = Path(demo[0]["run"])
    root, user = run.parents[2], run.parents[1].name
    with load_engine("demo", "seed-0", user=user, root=root) as model:
        assert model.path.name == f"step-{STEPS:08d}"
        answer = model.chat(messages(items(held_out=True)[0]), max_new_tokens=8)
    assert answer["role"] == "assistant"
    assert answer["content"]


def typed(output: str, title: str) -> str:
    """The lines to type below a title, as they are."""
    block = output.split(f"\n{title}", 1)[1].split("\n", 1)[1].split("\n\n")[0]
    return "\n".join(line.removeprefix("    ") for line in block.splitlines())


def test_the_commands_that_the_demo_ends_with_work(
    demo: tuple[dict[str, Any], str], folder: Path
) -> None:
    """Serve it, connect an agent: but for the port, exactly as printed."""
    figures, output = demo
    run = Path(figures["run"])
    assert RunDir.of(run.parents[2], run.parents[1].name, "demo", "seed-0").path == run
    port = str(own_port())
    command = typed(output, "Serve what was learned").replace("\\\n", "").replace(str(PORT), port)
    connect = typed(output, "Connect your own agent").replace(str(PORT), port)
    with serve(*command.split("any-agent serve ")[1].split(), cwd=folder) as service:
        assert service.url == f"http://127.0.0.1:{port}"
        script = f'{connect}\necho "$OPENAI_BASE_URL $OPENAI_API_KEY"'
        told = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
        base_url, key = told.stdout.split()
        client = openai.OpenAI(base_url=base_url, api_key=key)
        done = client.chat.completions.with_raw_response.create(
            model="gpt-4o-mini",
            messages=messages(items(held_out=True)[0]),  # type: ignore[arg-type]
        )
        assert done.headers["x-any-agent-session"].startswith("ses-")
        assert done.parse().choices[0].message.content
        refused = httpx.post(f"{service.url}/rl/v1/start_session", json={})
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "run_finished"
        assert refused.json()["error"]["run"]["checkpoint"].endswith(f"step-{STEPS:08d}")


def processes_of(shown: Terminal) -> list[psutil.Process]:
    top = psutil.Process(shown.process.pid)
    return [top, *top.children(recursive=True)]


def stopped_well(shown: Terminal, kept: Path) -> None:
    """Ctrl-C: gone within seconds, with every child, and the terminal is as it was."""
    started = processes_of(shown)
    shown.press_ctrl_c()
    assert shown.end(timeout=120) == 130, shown.text[-4000:]
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
    assert shown.settings_now() == shown.settings
    assert shown.raw.rindex("\x1b[?25h") > shown.raw.rindex("\x1b[?25l"), "the cursor is hidden"
    assert "Traceback" not in shown.text
    assert shown.text.rstrip().splitlines()[-1] == f"stopped   files are in {kept}"


def test_a_part_that_dies_is_seen_to_come_back_and_ctrl_c_ends_it_all(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [*CLI, "demo", "--ranks", "1", "--keep", str(kept)]
    with terminal(command, cwd=tmp_path, env=environment()) as shown:
        shown.until("asking held-out prompts", 400)
        (router,) = [p for p in processes_of(shown) if p.cmdline()[1:3] == ["-m", "router"]]
        router.kill()
        shown.until("ready (restarted once)", 240)
        stopped_well(shown, kept)
