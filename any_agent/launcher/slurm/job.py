"""The Slurm job of this process: its nodes, their addresses, their shared folder, its requeue."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from any_agent.config import Config
from any_agent.errors import ConfigError, StartupError
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import write_atomic
from any_agent.runtime.private_address import is_private

_COMMAND_TIMEOUT = 60.0
_SHARED_TIMEOUT = 60.0  # seconds for which a network file system may show a folder as it was
_POLL_INTERVAL = 0.5
_RESERVED = 40.0
"""Seconds of the warning that are reserved for copies of the journals and for Slurm."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The job as Slurm's variables describe it."""

    id: str
    nodes: tuple[str, ...]
    gpus: int
    """GPUs of each node, counted on this one."""
    restarts: int
    """Number of times that it was queued again."""


def current_job(environ: Mapping[str, str] | None = None) -> SlurmJob | None:
    """Return the job whose script this is; None outside of a job.

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
    nodes = tuple(run_slurm(["scontrol", "show", "hostnames", listed]).split())
    if not nodes:
        raise StartupError(f"Slurm names no nodes of job {id} (SLURM_JOB_NODELIST={listed!r})")
    return SlurmJob(
        id,
        nodes,
        int(environ.get("SLURM_GPUS_ON_NODE", "0") or 0),
        int(environ.get("SLURM_RESTART_COUNT", "0") or 0),
    )


def run_slurm(command: Sequence[str], *, within: float = _COMMAND_TIMEOUT) -> str:
    """Run one of Slurm's programs and return its output.

    Raises ConfigError if it is missing, StartupError if it fails or does not end in time.
    """
    require_program(command[0])
    try:
        done = slurm_process(command, within)
    except subprocess.TimeoutExpired:
        raise StartupError(
            f"{command[0]} did not answer within {within:g} s: is Slurm's controller there?"
        ) from None
    if done.returncode:
        output = (done.stderr or done.stdout).strip()[-500:]
        raise StartupError(f"{' '.join(command[:3])} failed: {output}")
    return done.stdout


def slurm_process(command: Sequence[str], within: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; subprocess.TimeoutExpired after ``within`` seconds."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=within,
        stdin=subprocess.DEVNULL,
        errors="replace",
        umask=0o077,  # sbatch passes it on to the job and to the job's log
    )


def require_program(name: str) -> None:
    """Raise ConfigError where Slurm's programs are missing."""
    if shutil.which(name) is None:
        raise ConfigError(
            f"{name} is not found: this machine has no Slurm, or its programs are not in PATH "
            "(`module load slurm`, say). Without Slurm, `python3 -m any_agent.launcher.local "
            "any_agent_grpo.py --config FILE` runs all of it here, and so does `any-agent train`"
        )


def node_address(node: str, network: str | None) -> str:
    """Return the private IP address of this machine, which Slurm calls ``node``.

    ``network``: the network of the address; None: Slurm's own address of the node. Raises
    ConfigError if the machine has none there, or if it is public.
    """
    if network is not None:
        return _own_address(node, network)
    match = re.search(
        r"\bNodeAddr=(\S+)", run_slurm(["scontrol", "--oneliner", "show", "node", node])
    )
    name = match[1] if match else node
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


def drain_seconds(config: Config) -> float:
    """Return the seconds after the warning in which running work may end."""
    warning = config.cluster.warning
    return max(0.5 * warning, warning - _RESERVED)


def requeue(id: str) -> None:
    """Have Slurm end this job and queue it again; StartupError if it cannot."""
    run_slurm(["scontrol", "requeue", id])


def mark(run: RunDir) -> str:
    """Write a token into the run's folder that only its other readers can know."""
    token = secrets.token_hex(16)
    write_atomic(run.shared, f"{token}\n")
    return token


def require_shared(
    run: RunDir, token: str, node: str, *, patience: float = _SHARED_TIMEOUT
) -> None:
    """Raise ConfigError if this node's folder of that name is not the one with the token."""
    deadline = time.monotonic() + patience
    while True:
        try:
            found = run.shared.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            found = None
        if found == token:
            return
        if time.monotonic() >= deadline:
            what = "is not there" if found is None else "is another one"
            raise ConfigError(
                f"{run.path} is not shared by the job's nodes: on {node} it {what}; set root to a "
                "folder on a file system that all of them see"
            )
        time.sleep(_POLL_INTERVAL)
