"""The roles of a job's nodes, by the numbers of nodes and GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from any_agent.config import Config
from any_agent.errors import ConfigError, StartupError


class NodeLost(StartupError):
    """A node is lost, and the others cannot do its work."""


@dataclass(frozen=True, slots=True)
class Role:
    """The role of one node."""

    index: int
    """The node's index in the job."""
    node: str
    """The node's name in Slurm."""
    ranks: tuple[int, ...] = ()
    """Ranks whose engines and proxies it runs."""
    training: int | None = None
    """The node's index among the training nodes."""
    training_nodes: int = 1
    """Number of training nodes."""
    first_trainer: int = 0
    """The index of the node with the trainer's rank 0."""
    gpus_taken: int = 0
    """GPUs of the node, its last ones, that engines of another role there have."""

    @property
    def router(self) -> bool:
        return self.index == 0

    @property
    def named_ranks(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks))}"

    def __str__(self) -> str:
        parts = []
        if self.ranks:
            parts.append(f"engines and proxies of {self.named_ranks}")
        if self.router:
            parts.append("the router")
        if self.training is not None:
            parts.append("the trainer" if self.training == 0 else "more of the trainer")
        return "; ".join(parts)


def count_ranks(roles: Iterable[Role]) -> int:
    return sum(len(role.ranks) for role in roles)


def plan(config: Config, nodes: Sequence[str], gpus: int) -> list[Role]:
    """Assign roles to nodes with ``gpus`` GPUs each.

    Inference is on the first nodes, training on the last ones, the router on the very first; a
    single node does everything. Without training nodes the first one trains, too. Raises
    ConfigError that names settings that do not fit.
    """
    training = config.cluster.training_nodes
    inference, first = len(nodes) - training, len(nodes) - training
    shared = len(nodes) == 1 or training == 0
    if shared:
        inference, training, first = len(nodes), 1, 0
    elif inference < 1:
        raise ConfigError(
            f"cluster.training_nodes={training} leaves none of the job's {len(nodes)} nodes for "
            "engines: request more nodes (cluster.nodes), or train on fewer"
        )
    each = _ranks_per_node(config, inference, gpus, shared=shared)
    _check_ranks(config, inference, each)
    _check_training(config, gpus)
    roles = []
    for index, name in enumerate(nodes):
        ranks = tuple(range(index * each, (index + 1) * each)) if index < inference else ()
        trains = index - first if first <= index < first + training else None
        roles.append(Role(index, name, ranks, trains, training, first))
    return roles


def place_elsewhere(config: Config, lost: Role, left: Sequence[Role], gpus: int) -> Role:
    """Return a lost node's role as another node has it: the one with the fewest ranks and room.

    ``left``: all roles of the nodes that are left, each of which has ``gpus`` GPUs. Raises NodeLost
    if none of them can.
    """
    if lost.training is not None:
        raise NodeLost(f"{lost.node} is lost, and with it a trainer, which no other node can be")
    ranks = Counter[str]()
    for role in left:
        ranks[role.node] += len(role.ranks)
    trains = {role.node for role in left if role.training is not None}
    fills = gpus > 0 and config.engine.kind == "sglang" and config.engine.device != "cpu"
    each = config.engine.gpus if fills and not config.engine.urls else 0

    def has_room(node: str) -> bool:
        # A trainer has all GPUs that engines leave.
        free = 0 if node in trains else gpus - each * ranks[node]
        return each * len(lost.ranks) <= free

    room = [node for node in ranks if has_room(node)]
    if not room:
        raise NodeLost(
            f"{lost.node} is lost, and no other node has {each * len(lost.ranks)} free GPUs for "
            f"the engines of its {lost.named_ranks}"
        )
    node = min(room, key=lambda name: (name in trains, ranks[name]))
    return replace(lost, node=node, gpus_taken=each * ranks[node])


def _ranks_per_node(config: Config, inference: int, gpus: int, *, shared: bool) -> int:
    """Return the engines on each inference node; a node that also trains has the configured
    number."""
    wanted, each = config.cluster.ranks_per_node, config.engine.gpus
    use_gpus = gpus > 0 and config.engine.device != "cpu" and not config.engine.urls
    if use_gpus and wanted is not None and wanted * each > gpus:
        raise ConfigError(
            f"cluster.ranks_per_node={wanted} engines with engine.gpus={each} need {wanted * each} "
            f"GPUs, and a node has {gpus}: lower one of them"
        )
    if wanted is not None:
        return wanted
    if use_gpus and not shared:
        if gpus % each:
            fits = ", ".join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)
            raise ConfigError(
                f"engine.gpus={each} does not divide the {gpus} GPUs of a node: choose one of "
                f"{fits}, or set the number of engines of a node (cluster.ranks_per_node)"
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
    """Raise ConfigError if a configured number of ranks differs; a default gives way."""
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
            f"train.processes={processes}, but a node has {gpus} GPUs: each process needs its own"
        )
