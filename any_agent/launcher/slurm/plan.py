"""Which node of a job does what, by the numbers of nodes and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from any_agent.config import Config
from any_agent.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Role:
    """What one node does."""

    index: int
    """Of the node, in the job's order."""
    node: str
    """Its name in Slurm."""
    ranks: tuple[int, ...] = ()
    """Whose engines and proxies it has."""
    training: int | None = None
    """Which of the training nodes it is."""

    @property
    def router(self) -> bool:
        return self.index == 0

    def __str__(self) -> str:
        parts = []
        if self.ranks:
            numbers = ", ".join(map(str, self.ranks))
            parts.append(f"engines and proxies of ranks {numbers}")
        if self.router:
            parts.append("the router")
        if self.training is not None:
            parts.append("the trainer" if self.training == 0 else "more of the trainer")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Every node's role."""

    roles: tuple[Role, ...]
    ranks: int
    """In all."""
    training_nodes: int


def plan(config: Config, nodes: Sequence[str], gpus: int) -> NodePlan:
    """Roles of these nodes with so many GPUs each: inference on the first ones, training on the
    last ones, the router on the very first. A single node does all of it.

    Raises ConfigError for numbers that do not fit, by their settings' names.
    """
    training = config.cluster.training_nodes
    inference = len(nodes) - training
    if len(nodes) == 1:
        inference = 1
    elif inference < 1:
        raise ConfigError(
            f"cluster.training_nodes={training} leaves none of the job's {len(nodes)} nodes for "
            "engines: ask for more nodes (cluster.nodes), or train on fewer"
        )
    each = _ranks_per_node(config, inference, gpus, shared=len(nodes) == 1)
    _check_ranks(config, inference, each)
    _check_training(config, gpus)
    roles = []
    for index, name in enumerate(nodes):
        ranks = tuple(range(index * each, (index + 1) * each)) if index < inference else ()
        trains = index - inference if index >= inference else None
        roles.append(Role(index, name, ranks, 0 if len(nodes) == 1 else trains))
    return NodePlan(tuple(roles), inference * each, 1 if len(nodes) == 1 else training)


def _ranks_per_node(config: Config, inference: int, gpus: int, *, shared: bool) -> int:
    """Engines on each node that has some; on the one that also trains, as many as configured."""
    told, each = config.cluster.ranks_per_node, config.engine.gpus
    use_gpus = gpus > 0 and config.engine.device != "cpu" and not config.engine.urls
    if use_gpus and told is not None and told * each > gpus:
        raise ConfigError(
            f"cluster.ranks_per_node={told} engines with engine.gpus={each} need {told * each} "
            f"GPUs, and a node has {gpus}"
        )
    if told is not None:
        return told
    if use_gpus and not shared:
        if gpus % each:
            fits = ", ".join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)
            raise ConfigError(
                f"engine.gpus={each} does not divide the {gpus} GPUs of a node: choose one of "
                f"{fits}, or say how many engines a node has (cluster.ranks_per_node)"
            )
        return gpus // each
    ranks = config.server.ranks
    if ranks % inference:
        raise ConfigError(
            f"server.ranks={ranks} cannot be divided among {inference} nodes with engines: choose "
            f"a multiple of {inference}, or other numbers of nodes (cluster.nodes, "
            "cluster.training_nodes)"
        )
    return ranks // inference


def _check_ranks(config: Config, inference: int, each: int) -> None:
    """What somebody wrote down must be so; what is only the default gives way."""
    ranks, found = config.server.ranks, inference * each
    if ranks != found and ("ranks" in config.server.model_fields_set or config.engine.urls):
        raise ConfigError(
            f"server.ranks={ranks}, but {inference} nodes with {each} engines each make {found}: "
            "leave server.ranks out, or set cluster.ranks_per_node"
        )


def _check_training(config: Config, gpus: int) -> None:
    processes = config.train.processes
    if gpus and config.train.device != "cpu" and processes > gpus:
        raise ConfigError(
            f"train.processes={processes}, but a node has {gpus} GPUs: each of them needs its own"
        )
