"""What a job's variables say, Slurm's programs, addresses of nodes, and the folder that all see."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.slurm import job as jobs
from any_agent.launcher.slurm.job import (
    SlurmJob,
    current_job,
    mark,
    node_address,
    require_program,
    require_shared,
    run_slurm,
)
from any_agent.rundir.layout import RunDir
from tests.support.errors import fails_with


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for it that says what is in a file."""
    answer = tmp_path / "answer"
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat {answer} && ! test -e {tmp_path}/fails\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return answer


def test_a_job_is_read_from_slurms_variables(scontrol: Path) -> None:
    assert current_job({}) is None
    scontrol.write_text("n1\nn2\n")
    told = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert current_job(told) == SlurmJob("7", ("n1", "n2"), 0, 0)
    told |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_RESTART_COUNT": "3"}
    assert current_job(told) == SlurmJob("7", ("n1", "n2"), 8, 3)
    with fails_with(ConfigError, "srun"):
        current_job(told | {"SLURM_STEP_ID": "0"})
    scontrol.write_text("")
    with fails_with(StartupError, "job 7", "SLURM_JOB_NODELIST"):
        current_job(told)


def test_a_machine_without_slurm_is_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for call in (lambda: require_program("sbatch"), lambda: run_slurm(["sbatch", "x"])):
        with fails_with(ConfigError, "sbatch", "PATH"):
            call()


def test_a_nodes_address_is_what_slurm_tells_unless_it_is_public(scontrol: Path) -> None:
    for told, found in (
        ("NodeName=n1 NodeAddr=127.0.0.2 NodeHostName=x", "127.0.0.2"),
        ("NodeName=n1 NodeAddr=10.1.2.3", "10.1.2.3"),
    ):
        scontrol.write_text(f"{told}\n")
        assert node_address("n1", None) == found
    for address in ("8.8.8.8", "no-such-host.invalid"):
        scontrol.write_text(f"NodeName=n1 NodeAddr={address}\n")
        with fails_with(ConfigError, "n1", address, "cluster.network"):
            node_address("n1", None)
    assert node_address("n1", "127.0.0.0/8") == "127.0.0.1"
    with fails_with(ConfigError, "n1 ", "cluster.network=10.255.255.0/30"):
        node_address("n1", "10.255.255.0/30")


def test_a_folder_that_not_all_nodes_share_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    token = mark(run)
    require_shared(run, token, "n2", patience=0)
    with fails_with(ConfigError, run.path, "n2", "another"):
        require_shared(run, "another", "n2", patience=0)
    run.shared.unlink()
    with fails_with(ConfigError, run.path, "n2", "not there"):
        require_shared(run, token, "n2", patience=0)


def test_a_program_that_fails_is_told_with_its_words(scontrol: Path, tmp_path: Path) -> None:
    scontrol.write_text("Unable to contact slurm controller")
    jobs.requeue("7")
    (tmp_path / "fails").touch()
    with fails_with(StartupError, "scontrol requeue 7", "Unable to contact"):
        jobs.requeue("7")
