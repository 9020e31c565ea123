"""The whole loop on two nodes of a real Slurm: agents outside of the job, engines, GRPO, weights.

The job is warned of its time limit while it trains, keeps a checkpoint, is queued again, and goes
on elsewhere as far as agents can tell: they know nothing but the file with its URL. What it came to
is compared with the same steps made once more, in one go, from what it recorded.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from any_agent.config import Config, load_config
from any_agent.launcher.trial import trial_dir
from any_agent.rundir.layout import RunDir, weights_folder
from tests.slurm.jobs import ADMIN, Outside, key_of_a_tenant, over, said, sbatch, settings
from tests.slurm.lab import PATIENCE, Slurm, until
from tests.support.e2e.audit import leaks, read_records
from tests.support.e2e.history import consumed_in
from tests.support.e2e.killing import stopped
from tests.support.e2e.live_run import steps_of
from tests.support.e2e.retrain import retrain

STEPS = 12
BEFORE = 4
"""Steps until its time is almost over."""
ENOUGH = 6
"""Steps before the warning; what was sampled in advance makes three more at most."""
WARNING = 180


@dataclass
class Run:
    config: Config
    dir: RunDir
    job: str
    log: str
    before: list[dict[str, Any]]
    """Steps that were made when the job was queued again."""
    saved: str
    """The latest checkpoint then."""
    agents: dict[str, Any]


@pytest.fixture(scope="module")
def run(cluster: Slurm, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("loop")
    path, log = settings(folder, model, steps=STEPS, warning=WARNING), folder / "job.log"
    config = load_config(path, environ={})
    dir = trial_dir(config)
    agents_key = key_of_a_tenant(cluster, path)
    job = sbatch(cluster, path, log, "--time=60", f"--signal=B:USR1@{WARNING}")
    with Outside(cluster, dir, agents_key, folder / "agents.log") as agents:
        until(lambda: len(steps_of(dir)) >= BEFORE or over(cluster, job), lambda: said(log))
        assert not over(cluster, job), said(log)
        # What is left is shorter than the warning then.
        cluster.limit(job, minutes_of(cluster, job) + 2)
        # Slurm looks at times twice a minute.
        until(lambda: len(steps_of(dir)) >= ENOUGH or "draining" in said(log), lambda: said(log))
        with stopped(agents.pid):
            until(lambda: f"{job} is queued again" in said(log), lambda: said(log))
        before = steps_of(dir)
        saved = (dir.checkpoints / "latest").read_text().strip()
        cluster.limit(job, 60)
        until(lambda: cluster.state(job) == "COMPLETED", lambda: said(log))
        agents.wait(PATIENCE)
    told = (folder / "agents.log").read_text()
    assert agents.returncode == 0, told
    last = json.loads(told.splitlines()[-1])
    return Run(config, dir, job, said(log), before, saved, last)


def minutes_of(cluster: Slurm, job: str) -> int:
    """For which the job has run, begun ones too."""
    found = re.search(r"RunTime=(\d+):(\d+):\d+", cluster.ask("scontrol", "show", "job", job))
    assert found is not None
    return 60 * int(found[1]) + int(found[2]) + 1


def test_the_log_names_nodes_roles_addresses_and_steps(run: Run) -> None:
    assert f"job       {run.job} on n1, n2\n" in run.log
    assert "role      n1 (127.0.0.1): engines and proxies of ranks 0, 1; the router" in run.log
    assert "role      n2: the trainer" in run.log
    assert f"job       {run.job} on n1, n2, restart 1" in run.log
    urls = re.findall(r"INFO: any-agent server listening at (\S+)$", run.log, re.MULTILINE)
    assert len(urls) == 2
    assert run.dir.url.read_text().strip() == urls[-1]
    shown = re.findall(r"^step +(\d+)/12  reward ", run.log, re.MULTILINE)
    assert [int(step) for step in shown] == list(range(1, STEPS + 1))
    assert run.log.count("service   stopped") >= 1
    assert leaks(run.dir, [ADMIN]) == [] and ADMIN not in run.log


def test_the_reward_rises_on_two_nodes(run: Run) -> None:
    rewards = [step["reward"] for step in steps_of(run.dir)]
    assert sum(rewards[-3:]) > sum(rewards[:3]), rewards


def test_agents_saw_no_more_than_calls_that_failed(run: Run) -> None:
    assert "failed" not in run.agents["states"], run.agents
    trained = STEPS * run.config.rollout.batch_size
    assert run.agents["states"]["finalized"] >= trained


def test_a_job_that_was_queued_again_goes_on_bit_for_bit(run: Run) -> None:
    steps = steps_of(run.dir)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert steps[: len(run.before)] == run.before
    assert len(run.before) < STEPS, "it was done before it was warned"
    versions = [step["version"] for step in steps]
    assert versions == sorted(set(versions)), versions
    # The warning's own checkpoint, of the last step that was made.
    assert run.saved == f"step-{run.before[-1]['step']:08d}"
    kept = load_file(run.dir.checkpoints / run.saved / "model.safetensors")
    published = load_file(
        weights_folder(run.dir.weights, run.before[-1]["version"]) / "model.safetensors"
    )
    assert kept.keys() >= published.keys()
    assert all(torch.equal(kept[name], tensor) for name, tensor in published.items())
    # Made again from the first checkpoint, without a break: each later one bit for bit.
    records = read_records(run.dir, run.config.server.ranks)
    compared, different = retrain(run.config, run.dir, records)
    assert compared >= 3
    assert different == []
    last = run.dir.checkpoints / f"step-{STEPS:08d}"
    trained = [one for one in consumed_in(last).values() if one.rejected is None]
    assert len(trained) == sum(step["sessions"] for step in steps)
