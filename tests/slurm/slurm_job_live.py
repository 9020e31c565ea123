"""Jobs of a real Slurm that are cancelled, and those that cannot be: submitted, refused, named."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from any_agent.config import load_config
from any_agent.launcher.trial import latest_weights, trial_dir
from tests.slurm.jobs import (
    Outside,
    key_of_a_tenant,
    said,
    sbatch,
    settings,
    variables,
)
from tests.slurm.lab import PATIENCE, REPOSITORY, Slurm, until

STEPS = 1000
"""More than are made."""
SOON = 240.0
"""Seconds in which what needs no job to train must have happened."""


@dataclass
class Refused:
    """A job that ends with an error."""

    job: str
    log: Path
    error: str
    """What it says, as a regular expression."""


@pytest.fixture(scope="module")
def refused(
    cluster: Slurm, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Refused]]:
    """Submitted before the others, as finding out that a folder is not shared takes a minute."""
    apart = cluster.folder / "apart"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = {
            f"server.port={port}": f"error: cannot listen on 127.0.0.1:{port}: Address already in",
            "engine.kind=sglang engine.device=cuda engine.gpus=3": (
                "error: engine.gpus=3 does not divide the 4 GPUs of a node: choose one of 1, 2, 4"
            ),
            "cluster.training_nodes=2": "error: cluster.training_nodes=2 leaves none",
        }
        if cluster.apart:
            cases[f"root={apart}"] = "is not shared by the job's nodes: on n2 it is not there"
        made = []
        for overrides, error in cases.items():
            folder = tmp_path_factory.mktemp("refused")
            path, log = settings(folder, model, steps=STEPS), folder / "job.log"
            options = ("--gpus-per-node=4",) if "gpus" in overrides else ()
            job = sbatch(cluster, path, log, *options, overrides=overrides)
            made.append(Refused(job, log, error))
        yield made


def submit(cluster: Slurm, path: Path) -> subprocess.CompletedProcess[str]:
    """By the launcher, outside of a job."""
    command = [sys.executable, "-m", "any_agent.launcher.slurm", "trainer/any_agent_grpo.py"]
    return subprocess.run(
        [*command, "--config", str(path), "--no-wait"],
        cwd=REPOSITORY,
        env=variables(cluster),
        capture_output=True,
        text=True,
        timeout=SOON,
    )


@pytest.mark.timeout(PATIENCE + 5 * SOON, func_only=True)
@pytest.mark.usefixtures("refused")
def test_a_cancelled_job_leaves_no_process_and_all_that_the_next_needs(
    cluster: Slurm, model: Path, tmp_path: Path
) -> None:
    path = settings(tmp_path, model, steps=STEPS)
    config = load_config(path, environ={})
    run, agents_key = trial_dir(config), key_of_a_tenant(cluster, path)
    done = submit(cluster, path)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(
        r"job       (\d+): any-agent-demo-seed-0, 2 nodes\n"
        r"log       (.+)\nurl       will be in (.+)\n",
        done.stdout,
    )
    assert found is not None, done.stdout
    job, log = found[1], Path(found[2])
    assert found[3] == str(run.url)
    again = submit(cluster, path)
    assert again.returncode != 0
    assert f"error: demo/seed-0 has a job already: {job}; scancel it" in again.stderr
    with Outside(cluster, run, agents_key, tmp_path / "agents.log"):
        until(lambda: latest_weights(config) or cluster.state(job) == "FAILED", lambda: said(log))
        assert len(cluster.processes(job)) > 5
        cluster.ask("scancel", job)
        at_work = ("RUNNING", "COMPLETING")
        until(lambda: cluster.state(job) not in at_work, lambda: said(log), SOON)
        assert cluster.state(job) == "CANCELLED", said(log)
        until(lambda: not cluster.processes(job), lambda: str(cluster.processes(job)), SOON)
    text = said(log)
    assert "service   draining: new work is refused" in text
    assert "service   stopped" in text
    assert "queued again" not in text
    # What the next job goes on from, wherever it runs.
    assert latest_weights(config) is not None
    for rank in range(config.server.ranks):
        assert json.loads((run.path / "journal" / f"rank-{rank}.json").read_text())["kept"]
        assert (run.path / "journal" / f"rank-{rank}.kept").exists()


def test_jobs_with_impossible_settings_fail_with_the_reason(
    cluster: Slurm, refused: list[Refused]
) -> None:
    def logs() -> str:
        return "\n".join(
            f"{one.job} is {cluster.state(one.job)}:\n{said(one.log)}" for one in refused
        )

    until(lambda: all(cluster.state(one.job) == "FAILED" for one in refused), logs)
    for one in refused:
        assert re.search(one.error, said(one.log)), said(one.log)
    until(lambda: not any(cluster.processes(one.job) for one in refused), logs, SOON)
