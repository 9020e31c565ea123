"""Settings of a service on several machines of a Slurm job."""

from __future__ import annotations

import ipaddress
import re

from pydantic import Field, field_validator

from any_agent.config.base import Section, Texts

_OURS = (
    *("-J", "--job-name", "-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node", "-o", "--output"),
    *("--signal", "--requeue", "--no-requeue", "--open-mode", "--wrap", "--gpus-per-node"),
    *("-a", "--array", "--parsable", "-D", "--chdir"),
)
"""Options of sbatch that follow from other settings."""


class ClusterConfig(Section):
    """The machines of a Slurm job and their roles; not used elsewhere."""

    nodes: int = Field(1, ge=1, le=1000)
    """Nodes to request. Inside a job, the job's own number counts."""
    gpus_per_node: int = Field(0, ge=0, le=64)
    """GPUs to request on each node. Inside a job, the job's own number counts."""
    training_nodes: int = Field(1, ge=0)
    """Number of nodes that train, out of several; the others have engines and proxies, and the
    first of these the router. 0: all have engines, and the first one trains beside its own. A job
    of one node does everything there."""
    ranks_per_node: int | None = Field(None, ge=1)
    """Engines, each with a proxy, on each node that has engines. null: as many as `engine.gpus`
    allows for its GPUs; without GPUs, `server.ranks` divided by those nodes."""
    network: str | None = None
    """The network by which the nodes reach each other, such as `10.1.0.0/16`. null: the address by
    which Slurm knows each node."""
    redis: bool = False
    """Start a Redis on the job's first node, its file in the run's folder, as the `server.journal`
    of the job: other nodes carry on the ranks of a lost one."""
    lost_after: float = Field(30.0, ge=1)
    """Seconds in which a node whose processes have ended must show itself again; later it is lost,
    and other nodes carry on its ranks. It counts with `cluster.redis` or `server.journal` only."""
    sbatch: Texts = ()
    """More options of sbatch, such as `--partition=gpu,--time=1-00:00:00,--account=mine`."""
    warning: int = Field(300, ge=60, le=3600)
    """Seconds before its time limit at which a job is warned. It then writes a checkpoint, ends,
    and is queued again. Allow for the longest step with its checkpoint, and a minute more."""
    requeue: bool = True
    """Queue the job again after that warning; it resumes from its checkpoint."""
    start_timeout: float = Field(1800.0, gt=0)
    """Seconds that the other nodes have until their parts are ready."""

    @field_validator("sbatch")
    @classmethod
    def _not_ours(cls, options: tuple[str, ...]) -> tuple[str, ...]:
        for option in options:
            name = re.split("[= ]", option, maxsplit=1)[0]
            if not option.startswith("-") or "\n" in option:
                raise ValueError(
                    f"{option[:80]!r} is no option of sbatch: write it like --partition=gpu"
                )
            if name in _OURS:
                raise ValueError(
                    f"remove {name}: it follows from experiment and trial, cluster.nodes, "
                    "cluster.gpus_per_node, cluster.warning and cluster.requeue"
                )
        return options

    @field_validator("network")
    @classmethod
    def _private_network(cls, network: str | None) -> str | None:
        if network is None:
            return None
        try:
            found = ipaddress.ip_network(network, strict=False)
        except ValueError:
            raise ValueError(
                f"{network[:80]!r} is not a network: write it like 10.1.0.0/16"
            ) from None
        if not found.is_private:
            raise ValueError(
                f"{network} is a public network: engines listen on private addresses only"
            )
        return str(found)
