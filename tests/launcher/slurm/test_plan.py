"""Which node does what, and numbers that do not fit."""

from __future__ import annotations

import pytest

from any_agent.config import Config, load_config
from any_agent.errors import ConfigError
from any_agent.launcher.slurm.plan import count_ranks, plan

GPUS = ["engine.kind=sglang", "engine.device=cuda"]
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
        (
            ["server.ranks=2", "cluster.training_nodes=2", *CPU],
            3,
            0,
            [((0, 1), None), ((), 0), ((), 1)],
        ),
        # With GPUs, as many as they make.
        (GPUS, 2, 4, [((0, 1, 2, 3), None), ((), 0)]),
        (["engine.gpus=2", *GPUS], 2, 4, [((0, 1), None), ((), 0)]),
        (["engine.gpus=2", *GPUS], 3, 4, [((0, 1), None), ((2, 3), None), ((), 0)]),
        (["cluster.ranks_per_node=1", *GPUS], 2, 4, [((0,), None), ((), 0)]),
        (["engine.gpus=3", "cluster.ranks_per_node=1", *GPUS], 2, 4, [((0,), None), ((), 0)]),
        # What is not to use them does not.
        (["server.ranks=2", *CPU], 2, 8, [((0, 1), None), ((), 0)]),
    ],
)
def test_roles(
    settings: list[str], nodes: int, gpus: int, roles: list[tuple[tuple[int, ...], int | None]]
) -> None:
    found = plan(configured(*settings), [f"n{k}" for k in range(nodes)], gpus)
    assert [(role.ranks, role.training) for role in found] == roles
    assert [role.node for role in found] == [f"n{k}" for k in range(nodes)]
    assert [role.router for role in found] == [True, *[False] * (nodes - 1)]
    assert count_ranks(found) == sum(len(ranks) for ranks, _ in roles)
    training_nodes = sum(training is not None for _, training in roles)
    assert {role.training_nodes for role in found} == {training_nodes}
    assert {role.first_trainer for role in found} == {nodes - training_nodes}


@pytest.mark.parametrize(
    ("settings", "nodes", "gpus", "said"),
    [
        (["engine.gpus=3", *GPUS], 2, 8, r"engine.gpus=3 does not divide the 8 GPUs .* 1, 2, 4, 8"),
        (
            ["engine.gpus=2", "cluster.ranks_per_node=3", *GPUS],
            2,
            4,
            "cluster.ranks_per_node=3 engines with engine.gpus=2 need 6 GPUs, and a node has 4",
        ),
        (["cluster.training_nodes=2", *CPU], 2, 0, "cluster.training_nodes=2 leaves none"),
        (["server.ranks=3", *CPU], 3, 0, "server.ranks=3 cannot be divided among 2 nodes"),
        (["server.ranks=2", *GPUS], 2, 4, "server.ranks=2, but 1 nodes with 4 engines each make 4"),
        (["train.processes=8", "train.device=cuda"], 2, 4, "train.processes=8, but a node has 4"),
    ],
)
def test_numbers_that_do_not_fit(settings: list[str], nodes: int, gpus: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(configured(*settings), [f"n{k}" for k in range(nodes)], gpus)


def test_roles_in_words() -> None:
    one, two = plan(configured("server.ranks=2", *CPU), ["a", "b"], 0)
    assert str(one) == "engines and proxies of ranks 0, 1; the router"
    assert str(two) == "the trainer"
