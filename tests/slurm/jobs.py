"""Jobs as an operator submits them, and agents outside of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from any_agent.demo.run import demo_config
from any_agent.rundir.layout import RunDir
from tests.slurm.lab import REPOSITORY, Slurm

ADMIN = "an-admin-key-of-thirty-two-letters"
_SHARED = "--oversubscribe"
"""Two jobs may have a node, unlike an operator's."""


def settings(
    folder: Path, model: Path, *, steps: int, warning: int = 120, **more: dict[str, Any]
) -> Path:
    """The YAML of a run on the cluster, whose journals are on each node's own disk.

    ``more``: further settings by section.
    """
    own: dict[str, Any] = demo_config(folder, seed=0, steps=steps, ranks=2).dump()
    own["model"]["path"] = str(model)
    own["server"]["journal_dir"] = str(folder / "local")
    own["train"] |= {"keep_weights": 1000, "keep_checkpoints": 1000, "checkpoint_every": 3}
    own["cluster"] |= {"nodes": 2, "warning": warning, "sbatch": [_SHARED]}
    # The nodes' GPUs are pretended.
    own["engine"]["device"] = own["train"]["device"] = "cpu"
    for section, values in more.items():
        own[section] |= values
    path = folder / "my.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(own))
    return path


def variables(cluster: Slurm) -> dict[str, str]:
    """An operator's."""
    return cluster.variables | {"PYTHON": sys.executable, "ANY_AGENT_SERVER__ADMIN_KEY": ADMIN}


def sbatch(cluster: Slurm, path: Path, log: Path, *options: str, overrides: str = "") -> str:
    """Submit the script as an operator does, from the repository's folder; the job's id."""
    done = subprocess.run(
        [
            *("sbatch", "--parsable", f"--output={log}", _SHARED, *options),
            *("deploy/slurm/any_agent_grpo.sbatch", str(path), *overrides.split()),
        ],
        cwd=REPOSITORY,
        env=variables(cluster),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


def said(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def over(cluster: Slurm, job: str) -> bool:
    return cluster.state(job) not in ("PENDING", "CONFIGURING", "RUNNING")


def key_of_a_tenant(cluster: Slurm, path: Path) -> str:
    command = [sys.executable, "-m", "any_agent.cli", "keys", "create", "--new-trial"]
    command += ["--config", str(path)]
    done = subprocess.run(
        [*command, "--scope", "tenant", "--tenant", "me", "--json"],
        env=cluster.variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return str(json.loads(done.stdout)["key"])


class Outside:
    """Agents that are told of a file, which need not be there yet."""

    def __init__(self, cluster: Slurm, dir: RunDir, key: str, log: Path) -> None:
        environment = {k: v for k, v in cluster.variables.items() if k != "SLURM_CONF"}
        environment |= {"ANY_AGENT_URL": dir.url.as_uri(), "ANY_AGENT_API_KEY": key}
        with open(log, "w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.slurm.agents"],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self._process

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
