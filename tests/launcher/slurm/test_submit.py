"""Submitting a job, with stand-ins for Slurm's programs: what is refused, and what is handed in."""

from __future__ import annotations

import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from any_agent.errors import StartupError
from any_agent.launcher.slurm import __main__ as command
from any_agent.launcher.slurm.__main__ import script
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.layout import RunDir
from tests.support.errors import fails_with
from tests.support.launcher.slurm_programs import Programs
from tests.support.launcher.stand_ins import Lab

KEY = "an-admin-key-of-thirty-two-letters"
RUN = ("any_agent_grpo.py", "--config", "MY")
Submit = Callable[..., tuple[int, str]]


@pytest.fixture
def submitted(
    lab: Lab,
    programs: Programs,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Submit:
    """Submit with these arguments, of a run with an admin key; the exit code, and what was said."""
    monkeypatch.setenv("ANY_AGENT_SERVER__ADMIN_KEY", KEY)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(command, "SETTLE_SECONDS", 0.0)
    settings = lab.home / "my.yaml"
    settings.write_text(f"root: {lab.home / 'runs'}\nmodel: {{path: {lab.home / 'model'}}}\n")

    def run(*arguments: str, wait: bool = False) -> tuple[int, str]:
        told = [text.replace("MY", str(settings)) for text in arguments]
        code = command.main(told if wait else [*told, "--no-wait"])
        said = capsys.readouterr()
        return code, said.out if wait else said.err

    return run


def the_run(lab: Lab) -> RunDir:
    return trial_dir(lab.config())


def test_settings_may_stand_anywhere_on_the_command_line(
    submitted: Submit, lab: Lab, programs: Programs
) -> None:
    for arguments in (
        (*RUN, "train.lr=1e-5"),
        ("any_agent_grpo.py", "train.lr=1e-5", "--config", "MY", "--stay"),
        ("--config", "MY", "any_agent_grpo.py", "--stay", "train.lr=1e-5"),
    ):
        assert submitted(*arguments)[0] == 0
        last = programs.submitted.splitlines()[-1]
        assert last.startswith("exec ") and "train.lr=1e-5" in last
        (path,) = the_run(lab).path.rglob("job.sbatch")
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, "it is for its owner alone"
        programs.end_jobs()


def test_a_key_is_refused_as_an_argument(submitted: Submit, lab: Lab) -> None:
    admin, engine = "ANY_AGENT_SERVER__ADMIN_KEY", "ANY_AGENT_ENGINE__KEY"
    for argument, variable in (
        (f"server.admin_key={KEY}", admin),
        (f"+server.admin_key={KEY}", admin),
        (f"server={{admin_key: {KEY}}}", admin),
        (f"engine.key={KEY}", engine),
        (f"++engine.key ={KEY}", engine),
    ):
        code, said = submitted(*RUN, argument)
        assert code == 2 and f"set {variable} instead" in said
    assert not the_run(lab).path.exists()


def test_a_model_that_is_not_there_is_not_submitted(submitted: Submit, lab: Lab) -> None:
    code, said = submitted(*RUN, f"model.path={lab.home / 'nothing'}")
    assert code == 2 and "is no model folder" in said
    reference = ("train.kl_coef=1", f"train.reference_model={lab.home / 'nothing'}")
    code, said = submitted(*RUN, *reference)
    assert code == 2 and "train.reference_model=" in said
    assert not the_run(lab).path.exists()


def test_a_service_of_one_node_needs_a_key_as_well(
    submitted: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job itself listens on its node's address."""
    monkeypatch.delenv("ANY_AGENT_SERVER__ADMIN_KEY")
    code, said = submitted(*RUN)
    assert code == 2 and "server.admin_key must be set" in said


def test_a_cluster_that_does_not_answer_is_the_only_fault_told(
    submitted: Submit, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ANY_AGENT_SERVER__ADMIN_KEY")
    programs.away("slurm_load_jobs error: Unable to contact\nslurm controller\n(connect failure)")
    code, said = submitted(*RUN, "server.host=0.0.0.0")
    assert code == 1
    assert said.startswith("error: Slurm's programs are here, but no cluster answers (squeue ")
    assert "Unable to contact): `python3 -m any_agent.launcher.local any_agent_grpo.py" in said
    assert "admin_key" not in said and said.count("\n") == 1


def test_the_nodes_disk_is_not_that_of_whoever_submits(submitted: Submit, lab: Lab) -> None:
    (lab.home / "file").touch()
    theirs = lab.home / "file" / "nvme"
    assert submitted(*RUN, f"server.journal_dir={theirs}")[0] == 0
    assert the_run(lab).path.is_dir()


@pytest.mark.parametrize(
    ("setting", "whole", "goes_on"),
    [
        ("log_level=info", True, False),
        ("cluster.sbatch=[--time=2:00, --partition=gpu]", True, False),
        ("cluster.sbatch=[--exclusive=user]", False, False),
        ("cluster.sbatch=[--cpus-per-gpu=8, --mem-per-gpu=60G]", False, False),
        ("cluster.sbatch=[--mem=100G]", False, False),
        ("cluster.sbatch=[-c 16]", False, False),
        ("cluster.redis=true", True, True),
        ("server.journal=redis://host/0", True, True),
    ],
)
def test_a_job_has_its_nodes_alone_and_goes_on_without_one_as_its_settings_say(
    lab: Lab, setting: str, whole: bool, goes_on: bool
) -> None:
    lines = script(lab.config(setting), [], lab.home / "log").splitlines()
    assert ("#SBATCH --exclusive" in lines) == whole
    assert ("#SBATCH --mem=0" in lines) == whole
    assert ("#SBATCH --no-kill" in lines) == goes_on


def test_a_job_with_two_redis_is_not_submitted(
    submitted: Submit, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANY_AGENT_SERVER__JOURNAL", "redis://:a-secret-password@host/0")
    code, said = submitted(*RUN, "cluster.redis=true")
    assert code == 2 and "remove one of them" in said and "a-secret-password" not in said
    assert not the_run(lab).path.exists()


def test_who_submits_is_told_where_the_service_is(
    submitted: Submit, lab: Lab, programs: Programs
) -> None:
    line = "[2026-11-23 12:34:56] INFO: any-agent server listening at http://10.1.0.1:8000"
    log = the_run(lab).logs / "job-7.log"
    programs.then(f"echo 'role n1' > {log}; echo '{line}' >> {log}\n")
    code, said = submitted(*RUN, wait=True)
    assert code == 0 and said.splitlines()[-1] == line


def test_who_waits_for_a_job_is_told_how_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[dict[str, str] | BaseException] = []

    def jobs(name: str) -> dict[str, str]:
        answer = looks.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(command, "jobs_named", jobs)
    monkeypatch.setattr(command, "POLL_INTERVAL", 0.0)
    wait = partial(command.until_listening, "name", "7", tmp_path / "log", print)
    for last, state in (({"7": "FAILED"}, "failed"), ({}, "gone")):
        looks += [{"7": "PENDING"}, {"7": "RUNNING"}, last]
        with fails_with(StartupError, "job 7", f"({state})", f"{tmp_path}/log"):
            wait()
    # Slurm may be away for a moment.
    away = [StartupError("squeue failed")] * command.MAX_FAILURES
    looks += [*away, {"7": "RUNNING"}, *away, StartupError("squeue failed for good")]
    with fails_with(StartupError, "for good"):
        wait()
    looks += [{"7": "PENDING"}, KeyboardInterrupt()]
    assert wait() == 0
    assert "goes on; scancel 7" in capsys.readouterr().out
    assert looks == []
