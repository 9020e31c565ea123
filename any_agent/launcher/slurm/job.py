"""The Slurm job that this process is in, and what is asked of Slurm."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from any_agent.errors import ConfigError, StartupError
from any_agent.runtime.private_address import is_private

_ASK_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """As Slurm's variables tell it."""

    id: str
    nodes: tuple[str, ...]
    gpus: int
    """On each node, as this one has them."""
    restarts: int
    """How often it was queued again."""


def current_job(environ: Mapping[str, str] | None = None) -> SlurmJob | None:
    """The job whose script this is; None outside of one.

    Raises ConfigError in a step of a job: it is the job's script that starts the steps.
    """
    environ = os.environ if environ is None else environ
    id = environ.get("SLURM_JOB_ID")
    if not id:
        return None
    if environ.get("SLURM_PROCID", "0") != "0" or environ.get("SLURM_STEP_ID", "").isdecimal():
        raise ConfigError(
            "this is a step of a Slurm job (srun): run it in the job's script, without srun; it "
            "starts what it needs on the other nodes itself"
        )
    listed = environ.get("SLURM_JOB_NODELIST", "")
    nodes = tuple(ask(["scontrol", "show", "hostnames", listed]).split())
    if not nodes:
        raise StartupError(f"Slurm names no nodes of job {id} (SLURM_JOB_NODELIST={listed!r})")
    return SlurmJob(
        id,
        nodes,
        int(environ.get("SLURM_GPUS_ON_NODE", "0") or 0),
        int(environ.get("SLURM_RESTART_COUNT", "0") or 0),
    )


def ask(command: Sequence[str], *, within: float = _ASK_TIMEOUT) -> str:
    """What one of Slurm's programs prints; ConfigError without it, StartupError if it fails."""
    require_program(command[0])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=within,
            stdin=subprocess.DEVNULL,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise StartupError(
            f"{command[0]} did not answer within {within:g} s: is Slurm's controller there?"
        ) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise StartupError(f"{' '.join(command[:3])} failed: {said}")
    return done.stdout


def require_program(name: str) -> None:
    """ConfigError where Slurm's programs are missing."""
    if shutil.which(name) is None:
        raise ConfigError(
            f"{name} is not found: this machine has no Slurm, or its programs are not in PATH "
            "(`module load slurm`, say). Without Slurm, `python3 -m any_agent.launcher.local "
            "any_agent_grpo.py --config FILE` runs all of it here, and so does `any-agent train`"
        )


def node_address(node: str, network: str | None) -> str:
    """The private IP address of this machine, which Slurm calls ``node``.

    ``network``: one of its own addresses there; None: the one by which Slurm reaches it. Raises
    ConfigError if it has none, or a public one.
    """
    if network is not None:
        return _own_address(node, network)
    told = re.search(r"\bNodeAddr=(\S+)", ask(["scontrol", "--oneliner", "show", "node", node]))
    name = told[1] if told else node
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"{name}, the address of node {node}, is not known here ({error}): set cluster.network "
            "to the network by which the nodes reach each other"
        ) from None
    address = str(found[0][4][0])
    if not is_private(address):
        raise ConfigError(
            f"Slurm reaches node {node} by {address}, which is public; engines listen on private "
            "addresses only: set cluster.network to the nodes' private network, like 10.1.0.0/16"
        )
    return address


def _own_address(node: str, network: str) -> str:
    import psutil

    wanted = ipaddress.ip_network(network)
    own = [entry.address.partition("%")[0] for e in psutil.net_if_addrs().values() for entry in e]
    for address in own:
        try:
            if ipaddress.ip_address(address) in wanted:
                return str(address)
        except ValueError:
            continue  # a hardware address
    raise ConfigError(f"node {node} has no address in cluster.network={network}")


def requeue(job: SlurmJob) -> None:
    """Have Slurm end this job, and start it again when there is room; StartupError if it cannot."""
    ask(["scontrol", "requeue", job.id])
