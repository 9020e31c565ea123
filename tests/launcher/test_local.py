"""The script that a launcher is told to start, and the launcher of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from any_agent.errors import ConfigError
from any_agent.launcher import local
from any_agent.launcher.local import SERVICE_SCRIPT as SERVICE
from any_agent.launcher.local import find_script, is_service, service_script
from any_agent.launcher.slurm import __main__ as slurm
from tests.support.e2e.serving import environment
from tests.support.errors import fails_with

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_script_is_found_here_first(tmp_path: Path) -> None:
    assert find_script(SERVICE) == service_script() == ROOT / "trainer" / SERVICE
    assert find_script(f"trainer/{SERVICE}") == service_script()
    (tmp_path / SERVICE).write_text("print('mine')\n")
    assert find_script(SERVICE) == Path(SERVICE)
    assert is_service(service_script()) and not is_service(Path(SERVICE))
    for missing in ("train.py", f"other/{SERVICE}"):
        with fails_with(ConfigError, missing, tmp_path):
            find_script(missing)


def test_a_script_of_ones_own_is_not_spread_over_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / SERVICE).write_text("print('mine')\n")
    for script in (SERVICE, str(ROOT / "examples" / "camel" / "train.py")):
        assert slurm.main([script]) == 2
        assert f"{script} cannot run on several nodes" in capsys.readouterr().err


def test_without_slurm_the_way_to_go_on_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "my-config.yaml").write_text("scheduler: {type: slurm}\nmodel: {path: x}\n")
    assert slurm.main([SERVICE, "--config", "my-config.yaml"]) == 2
    said = capsys.readouterr().err
    assert "sbatch is not found: this machine has no Slurm" in said
    assert f"python3 -m any_agent.launcher.local {SERVICE} --config FILE" in said
    assert "any-agent train" in said


def test_this_machine_runs_the_script_in_the_launchers_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys, any_agent; print(sys.argv)\n")
    done, wrong = (
        subprocess.run(
            [sys.executable, "-m", "any_agent.launcher.local", *arguments],
            env=environment(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            timeout=60,
        )
        for arguments in (
            ("mine.py", "--config", "a.yaml", "train.lr=1"),
            (SERVICE, "--config", "nothing.yaml"),
        )
    )
    assert done.stdout == "['mine.py', '--config', 'a.yaml', 'train.lr=1']\n", done.stderr
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "cannot read the configuration nothing.yaml" in wrong.stderr


def test_the_script_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    for module, name in ((local, "local"), (slurm, "slurm")):
        assert module.main([]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: name a script, e.g. any_agent.launcher.{name} {SERVICE}")
    for arguments, what in ((["--config", "x"], "name a script"), (["nothing.py"], "nothing.py")):
        assert local.main(arguments) == 2
        assert what in capsys.readouterr().err
    assert local.main(["--help"]) == 0
    assert "usage: python -m any_agent.launcher.local" in capsys.readouterr().out
