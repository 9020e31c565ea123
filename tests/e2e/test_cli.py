"""The command line: quick help, and mistakes told in one message."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from any_agent.cli.main import _parser
from any_agent.config import Config
from any_agent.rundir.layout import RunDir
from tests.support.e2e.serving import environment, run_cli

HEAVY = ("torch", "litellm", "transformers", "numpy", "fastapi", "openai", "pydantic", "yaml")


def commands() -> dict[str, argparse.ArgumentParser]:
    (actions,) = [a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(actions.choices)


@pytest.mark.parametrize("command", ["", *commands()])
def test_help_imports_nothing_heavy(command: str, tmp_path: Path) -> None:
    program = f"""
import contextlib, sys
from any_agent.cli import main
with contextlib.suppress(SystemExit):
    main({[command, "--help"] if command else ["--help"]})
print("heavy:", sorted(set(sys.modules) & set({HEAVY!r})))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: any-agent {command}".rstrip())
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_help_is_complete() -> None:
    text = _parser().format_help()
    # A long name has a line of its own.
    assert not [name for name in commands() if f"\n    {name}" not in text]
    for name, parser in commands().items():
        bare = [a.dest for a in parser._actions if not a.help]
        assert not bare, f"{name} does not explain {bare}"


def test_version(tmp_path: Path) -> None:
    done = run_cli("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "any-agent 0.1.0\n")


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr
    for word in words:
        assert word in done.stderr
    assert "listening" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["sreve"], "sreve"),
        (["serve", "--prot", "1"], "--prot"),
        (["demo", "--steps", "many"], "many"),
        (["demo", "--seed"], "--seed"),
    ],
)
def test_bad_flags(arguments: list[str], word: str, tmp_path: Path) -> None:
    refused(run_cli(*arguments, cwd=tmp_path), word)


def test_without_a_command_the_help_is_shown(tmp_path: Path) -> None:
    done = run_cli(cwd=tmp_path)
    assert done.returncode == 2
    assert "COMMAND" in done.stderr and "serve" in done.stderr


@pytest.mark.parametrize("command", ["serve", "train", "config"])
def test_unknown_key_names_the_nearest(command: str, tmp_path: Path) -> None:
    done = run_cli(command, "train.learning_rat=1", "train.step=3", cwd=tmp_path)
    refused(done, "unknown key train.step", "did you mean train.steps?", "train.learning_rat")


def test_unknown_key_in_the_environment(tmp_path: Path) -> None:
    done = run_cli("config", cwd=tmp_path, ANY_AGENT_TRAIN__STEP="3")
    refused(done, "did you mean train.steps?")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.steps=-1", "train.steps"),
        ("train.steps", "key=value"),
        ("engine.update_mode=fast", "engine.update_mode"),
        ("sampling.top_p=0.9", "sampling.top_p"),
        ("server.host=0.0.0.0", "ANY_AGENT_SERVER__ADMIN_KEY"),
        ("experiment=../up", "experiment"),
        ("server.port=70000", "server.port"),
    ],
)
def test_bad_values(setting: str, words: str, tmp_path: Path) -> None:
    refused(run_cli("config", setting, cwd=tmp_path), words)


@pytest.mark.parametrize(
    ("content", "word"),
    [(None, "cannot read"), ("a: [", "not valid YAML"), ("- 1", "mapping"), ("x: 1", "unknown")],
)
def test_bad_file(content: str | None, word: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    if content is not None:
        path.write_text(content)
    refused(run_cli("serve", "--config", str(path), cwd=tmp_path), word, "my.yaml")


def test_no_model(tmp_path: Path) -> None:
    refused(run_cli("serve", cwd=tmp_path), "model.path")


def test_a_model_path_that_is_none(tmp_path: Path) -> None:
    done = run_cli("serve", "--model", str(tmp_path / "nothing"), cwd=tmp_path)
    refused(done, str(tmp_path / "nothing"), "config.json")


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield int(other.getsockname()[1])


def test_port_in_use(busy_port: int, tmp_path: Path, tiny_model_dir: Path) -> None:
    done = run_cli("serve", "--model", str(tiny_model_dir), "--port", str(busy_port), cwd=tmp_path)
    refused(done, f"127.0.0.1:{busy_port}", "server.port")


@pytest.fixture
def earlier_run(tmp_path: Path) -> RunDir:
    """A trial that was started with two ranks."""
    run = RunDir.of(tmp_path / "runs", Config().user, "my-exp", "trial-1")
    run.create()
    (run.path / "config.yaml").write_text("model: {path: /models/a}\nserver: {ranks: 2}\n")
    return run


@pytest.mark.parametrize("command", [["serve"], ["serve", "--no-train"], ["train"]])
def test_a_trial_keeps_its_model(command: list[str], earlier_run: RunDir, tmp_path: Path) -> None:
    done = run_cli(*command, "--model", "/models/b", cwd=tmp_path)
    refused(done, "my-exp/trial-1", "/models/a", "/models/b", "--trial")


def test_a_run_of_an_older_format(earlier_run: RunDir, tmp_path: Path) -> None:
    (earlier_run.path / "format").unlink()
    (earlier_run.path / "config.yaml").write_text("engine: {url: http://old}\n")
    refused(run_cli("serve", cwd=tmp_path), str(earlier_run.path), "format '1'", "--trial")


def test_a_run_directory_in_use(tmp_path: Path, tiny_model_dir: Path) -> None:
    run = RunDir.of(tmp_path / "runs", Config().user, "my-exp", "trial-1")
    run.create()
    with run.lock():
        done = run_cli("serve", "--model", str(tiny_model_dir), "--port", "0", cwd=tmp_path)
    assert done.returncode == 1
    assert f"error: another service is using {run.path}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_root_that_cannot_be_written(tmp_path: Path, tiny_model_dir: Path) -> None:
    done = run_cli("serve", "--model", str(tiny_model_dir), "root=/proc/x", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot write in /proc/x/")
    assert len(done.stderr.splitlines()) == 1


def test_config_prints_what_would_be_used(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("train: {steps: 7, lr: 1e-3}\nexperiment: mine\n")
    done = run_cli(
        *["config", "--config", "my.yaml", "train.steps=9", "--trial", "second"],
        cwd=tmp_path,
        ANY_AGENT_TRAIN__STEPS="8",
        ANY_AGENT_TRAIN__SEED="8",
        ANY_AGENT_SERVER__ADMIN_KEY="very-secret",
    )
    assert done.returncode == 0, done.stderr
    for line in ("steps: 9", "seed: 8", "experiment: mine", "trial: second", "lr: 0.001"):
        assert line in done.stdout
    assert "very-secret" not in done.stdout
