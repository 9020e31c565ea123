"""The command line as a user meets it: help, and every mistake told in one message."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.e2e.serving import run_cli


def test_help_and_version_are_printed_and_a_missing_command_is_an_error(tmp_path: Path) -> None:
    assert run_cli("--version", cwd=tmp_path).stdout == "any-agent 0.1.0\n"
    for command in ("serve", "keys", "ranks"):
        told = run_cli(command, "--help", cwd=tmp_path)
        assert (told.returncode, told.stderr) == (0, "")
        assert told.stdout.startswith(f"usage: any-agent {command}")
    bare = run_cli(cwd=tmp_path)
    assert bare.returncode == 2
    assert "COMMAND" in bare.stderr and "serve" in bare.stderr


def missing_in(done: subprocess.CompletedProcess[str], *words: str) -> list[str]:
    """Return what a refusal of wrong input lacks."""
    wrong = [] if done.returncode == 2 else [f"exit code {done.returncode}"]
    wrong += ["a traceback"] if "Traceback" in done.stderr else []
    return wrong + [word for word in ("error: ", *words) if word not in done.stderr]


MISTAKES = (
    ("sreve", ("sreve",)),
    ("serve --prot 1", ("--prot",)),
    ("demo --steps many", ("many",)),
    *(
        (
            f"{command} train.learning_rat=1 train.step=3",
            ("unknown key train.step", "did you mean train.steps?", "train.learning_rat"),
        )
        for command in ("serve", "train", "config")
    ),
    ("config train.steps", ("key=value",)),
    ("config engine.update_mode=fast", ("engine.update_mode",)),
    ("config server.host=0.0.0.0", ("ANY_AGENT_SERVER__ADMIN_KEY",)),
    ("config experiment=../up", ("experiment",)),
    ("serve", ("model.path",)),
    ("serve --model nothing", ("nothing", "config.json")),
    ("serve --config absent.yaml", ("cannot read", "absent.yaml")),
    ("serve --config bad.yaml", ("not valid YAML", "bad.yaml")),
)


def test_a_mistake_is_told_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    found = {
        line: missing_in(run_cli(*line.split(), cwd=tmp_path), *words) for line, words in MISTAKES
    }
    done = run_cli("config", cwd=tmp_path, ANY_AGENT_TRAIN__STEP="3")
    found["the environment"] = missing_in(done, "did you mean train.steps?")
    assert {line: wrong for line, wrong in found.items() if wrong} == {}


def test_a_folder_that_cannot_be_written_is_told_in_one_line(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
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
