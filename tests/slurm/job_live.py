"""Jobs of a real Slurm that are cancelled, and those that cannot be: submitted, refused, named."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from functools import partial
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
    steps_of,
    variables,
)
from tests.slurm.lab import PATIENCE, REPOSITORY, Slurm, until

STEPS = 1000
"""More than are made."""

pytestmark = pytest.mark.timeout(900)


def submit(cluster: Slurm, path: Path) -> subprocess.CompletedProcess[str]:
    """By the launcher, outside of a job."""
    command = [sys.executable, "-m", "any_agent.launcher.slurm", "trainer/any_agent_grpo.py"]
    return subprocess.run(
        [*command, "--config", str(path)],
        cwd=REPOSITORY,
        env=variables(cluster),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_a_job_that_is_submitted_and_cancelled(cluster: Slurm, model: Path, tmp_path: Path) -> None:
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
        until(lambda: len(steps_of(run)) >= 2, lambda: said(log))
        assert len(cluster.processes(job)) > 5
        cluster.ask("scancel", job)
        until(lambda: cluster.state(job) == "CANCELLED", lambda: said(log))
        until(lambda: not cluster.processes(job), lambda: str(cluster.processes(job)))
    text = said(log)
    assert "service   draining: new work is refused" in text
    assert "service   stopped" in text
    assert "queued again" not in text
    # The last step is kept, and the journals are where another node finds them.
    saved = latest_weights(config)
    assert saved is not None and saved.step == steps_of(run)[-1]["step"]
    for rank in range(config.server.ranks):
        assert json.loads((run.path / "journal" / f"rank-{rank}.json").read_text())["kept"]
        assert (run.path / "journal" / f"rank-{rank}.kept").exists()


def test_jobs_that_cannot_be(cluster: Slurm, model: Path, tmp_path: Path) -> None:
    apart = cluster.folder / "apart"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = {
            f"server.port={port}": f"error: .*{port}.*",
            "engine.kind=sglang engine.gpus=3": (
                "error: engine.gpus=3 does not divide the 4 GPUs of a node: choose one of 1, 2, 4"
            ),
            "cluster.training_nodes=2": "error: cluster.training_nodes=2 leaves none",
        }
        if (apart / "of-n1").exists():
            cases[f"root={apart}"] = "is not shared by the job's nodes: on n2 it is not there"
        jobs = {}
        for k, overrides in enumerate(cases):
            folder = tmp_path / str(k)
            path, log = settings(folder, model, steps=STEPS), folder / "job.log"
            options = ("--gpus-per-node=4",) if "gpus" in overrides else ()
            jobs[overrides] = sbatch(cluster, path, log, *options, overrides=overrides), log
        for overrides, (job, log) in jobs.items():
            until(partial(_failed, cluster, job), partial(said, log))
            assert re.search(cases[overrides], said(log)), (overrides, said(log))
            assert not cluster.processes(job)


def _failed(cluster: Slurm, job: str) -> bool:
    return cluster.state(job) == "FAILED"
