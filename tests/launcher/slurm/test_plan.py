"""Which node does what, and numbers that do not fit."""

from __future__ import annotations

import pytest

from any_agent.config import Config, load_config
from any_agent.errors import ConfigError
from any_agent.launcher.slurm.plan import NodeLost, Role, count_ranks, place_elsewhere, plan
from tests.support.errors import fails_with

GPUS = ["engine.kind=sglang", "engine.device=cuda"]
ONE_OF_TWO = ["engine.gpus=2", "cluster.ranks_per_node=1", *GPUS]
THREE = ["cluster.ranks_per_node=3", *GPUS]
CPU = ["engine.device=cpu", "train.device=cpu"]


def configured(*settings: str) -> Config:
    return load_config(None, ["model.path=m", *settings], environ={})


@pytest.mark.parametrize(
    ("settings", "nodes", "gpus", "roles"),
    [
        # One node does everything, with as many engines as configured.
        (["server.ranks=3", *CPU], 1, 0, [((0, 1, 2), 0)]),
        (["server.ranks=2", *GPUS], 1, 8, [((0, 1), 0)]),
        # Without GPUs the configured engines are divided.
        (["server.ranks=2", *CPU], 2, 0, [((0, 1), None), ((), 0)]),
        (["server.ranks=4", *CPU], 3, 0, [((0, 1), None), ((2, 3), None), ((), 0)]),
        (["cluster.training_nodes=2", *CPU], 3, 0, [((0, 1), None), ((), 0), ((), 1)]),
        # With GPUs, as many as they make.
        (GPUS, 2, 4, [((0, 1, 2, 3), None), ((), 0)]),
        (["engine.gpus=2", *GPUS], 2, 4, [((0, 1), None), ((), 0)]),
        (["engine.gpus=2", *GPUS], 3, 4, [((0, 1), None), ((2, 3), None), ((), 0)]),
        (["cluster.ranks_per_node=1", *GPUS], 2, 4, [((0,), None), ((), 0)]),
        (["engine.gpus=3", "cluster.ranks_per_node=1", *GPUS], 2, 4, [((0,), None), ((), 0)]),
        # Without nodes that only train, the first one does both.
        (["server.ranks=2", "cluster.training_nodes=0", *CPU], 2, 0, [((0,), 0), ((1,), None)]),
        (["cluster.training_nodes=0", *ONE_OF_TWO], 2, 4, [((0,), 0), ((1,), None)]),
        # What is not to use them does not.
        (["server.ranks=2", *CPU], 2, 8, [((0, 1), None), ((), 0)]),
    ],
)
def test_each_node_has_its_role(
    settings: list[str], nodes: int, gpus: int, roles: list[tuple[tuple[int, ...], int | None]]
) -> None:
    found = plan(configured(*settings), [f"n{k}" for k in range(nodes)], gpus)
    assert [(role.ranks, role.training) for role in found] == roles
    assert [role.node for role in found] == [f"n{k}" for k in range(nodes)]
    assert [role.router for role in found] == [True, *[False] * (nodes - 1)]
    assert count_ranks(found) == sum(len(ranks) for ranks, _ in roles)
    training_nodes = sum(training is not None for _, training in roles)
    assert {role.training_nodes for role in found} == {training_nodes}
    (leader,) = (role.index for role in found if role.training == 0)
    assert {role.first_trainer for role in found} == {leader}


@pytest.mark.parametrize(
    ("settings", "nodes", "gpus", "said"),
    [
        (["engine.gpus=3", *GPUS], 2, 8, ("engine.gpus=3", "8 GPUs", "1, 2, 4, 8")),
        (["engine.gpus=2", *THREE], 2, 4, (*THREE[:1], "engine.gpus=2", "6 GPUs", "has 4")),
        (["cluster.training_nodes=2", *CPU], 2, 0, ("cluster.training_nodes=2", "2 nodes")),
        (["server.ranks=3", *CPU], 3, 0, ("server.ranks=3", "2 nodes")),
        (["server.ranks=2", *GPUS], 2, 4, ("server.ranks=2", "1 nodes", "4 engines")),
        (["train.processes=8", "train.device=cuda"], 2, 4, ("train.processes=8", "4 GPUs")),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    settings: list[str], nodes: int, gpus: int, said: tuple[str, ...]
) -> None:
    with fails_with(ConfigError, *said):
        plan(configured(*settings), [f"n{k}" for k in range(nodes)], gpus)


def test_a_role_of_a_node_names_its_ranks_and_parts() -> None:
    one, two = plan(configured("server.ranks=2", *CPU), ["a", "b"], 0)
    assert str(one) == "engines and proxies of ranks 0, 1; the router"
    assert str(two) == "the trainer"


def lost(*settings: str, nodes: int, gpus: int, index: int, gone: tuple[int, ...] = ()) -> Role:
    """Return the role that another node gets when this one, and those ``gone``, are lost."""
    config = configured(*settings)
    roles = plan(config, [f"n{k}" for k in range(nodes)], gpus)
    left = [role for role in roles if role.index not in (index, *gone)]
    return place_elsewhere(config, roles[index], left, gpus)


@pytest.mark.parametrize(
    ("settings", "nodes", "gpus", "gone", "node", "taken"),
    [
        # The only one that is left, though it trains.
        (["server.ranks=2", "cluster.training_nodes=0", *CPU], 2, 0, (), "n0", 0),
        # One that does not train comes first.
        (["server.ranks=4", *CPU], 3, 0, (), "n0", 0),
        (["server.ranks=4", *CPU], 3, 0, (0,), "n2", 0),
        # Engines of ours share GPUs, SGLang's do not.
        (["server.ranks=8", "engine.device=cuda", "cluster.ranks_per_node=4"], 3, 4, (), "n0", 0),
        (["cluster.ranks_per_node=2", *GPUS], 3, 4, (), "n0", 2),
        (ONE_OF_TWO, 3, 4, (), "n0", 2),
    ],
)
def test_another_node_gets_the_role_of_a_lost_one(
    settings: list[str], nodes: int, gpus: int, gone: tuple[int, ...], node: str, taken: int
) -> None:
    moved = lost(*settings, nodes=nodes, gpus=gpus, index=1, gone=gone)
    assert (moved.node, moved.gpus_taken) == (node, taken)
    assert (moved.index, moved.ranks) == (1, moved.ranks)
    assert moved.ranks


def test_the_node_with_the_fewest_ranks_replaces_a_lost_one() -> None:
    config = configured("server.ranks=3", *CPU)
    one, two, three, _ = plan(config, ["a", "b", "c", "d"], 0)
    moved = place_elsewhere(config, two, [one, three], 0)
    assert moved.node == "a"
    assert place_elsewhere(config, three, [one, moved, Role(4, "e", (7,))], 0).node == "e"


@pytest.mark.parametrize(
    ("settings", "index", "said"),
    [
        (GPUS, 1, ("n1 ", "4 free GPUs", "ranks 4")),
        (THREE, 1, ("n1 ", "3 free GPUs", "ranks 3, 4, 5")),
        (GPUS, 2, ("n2 ", "trainer")),
    ],
)
def test_a_node_that_no_other_can_replace_is_lost(
    settings: list[str], index: int, said: tuple[str, ...]
) -> None:
    with fails_with(NodeLost, *said):
        lost(*settings, nodes=3, gpus=4, index=index)
