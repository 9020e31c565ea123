"""The training loop, with a real policy and a service that hands out made-up episodes."""

from __future__ import annotations

import math

import pytest
import torch

from any_agent.errors import ServiceUnavailable, TrainingError
from any_agent.rundir.registry import RegistryEntry, publish
from any_agent.workflow import Episode
from tests.support.errors import fails_with
from tests.support.trainer.episodes import pair
from tests.support.trainer.loop import Lab, Method, config_of, moments_of, same
from trainer import publisher


def not_finite(name: str) -> Episode:
    """An agent's data that passed every check, and makes the loss infinite all the same."""
    return pair(name, logprob=math.nan)


def test_a_run_that_is_stopped_keeps_what_it_trained(settings: list[str]) -> None:
    lab = Lab(config_of(settings, "train.steps=9"), [pair("p0"), pair("p1")])
    lab.at("before settled", lambda settle, _: lambda *given: (settle(*given), lab.trainer.stop()))
    assert lab.trainer.train() is False
    assert lab.trainer.checkpoint is not None
    assert lab.trainer.checkpoint.name == "step-00000001"
    assert lab.executor.acks == [(["p0-good", "p0-bad"], {})]
    assert lab.service.states == [("training", 0)]


@pytest.mark.parametrize("content", ["", "x", "1"])
def test_a_start_has_a_higher_number_than_the_ranks_journals(
    settings: list[str], content: str
) -> None:
    """Its file may have been emptied by a crash: with an earlier number the ranks refuse it."""
    lab = Lab(config_of(settings, "train.steps=1"), [pair("p0")])
    run = lab.trainer.dir
    run.create()
    for rank, seen in enumerate((7, 3)):
        entry = RegistryEntry(
            name=f"rank-{rank}", boot_id="b", url="http://unused", pid=1, epoch=seen
        )
        publish(run.registry, entry)
    (run.path / "trainer.epoch").write_text(content)
    lab.trainer.train()
    assert (run.path / "trainer.epoch").read_text() == "8\n"


@pytest.mark.parametrize("how", ["silent", "refusing"])
def test_a_rank_that_does_not_hear_of_a_checkpoint_ends_nothing(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(publisher, "ANNOUNCE_TIMEOUT", 0.05)
    config = config_of(settings, "train.steps=3", "train.checkpoint_every=1")
    lab = Lab(config, [pair(f"p{k}") for k in range(3)])

    def leaving(save: Method, _: bool) -> Method:
        def saved() -> None:
            save()
            lab.service.away = how if lab.trainer.policy.steps < 3 else ""

        return saved

    lab.at("checkpoint", leaving)
    assert lab.trainer.train()
    assert lab.service.states == [("training", 0), ("training", 3), ("finished", 3)]


def test_that_training_has_ended_is_heard_by_all(settings: list[str]) -> None:
    """Otherwise agents would wait for slots for ever; so the trainer ends, and is restarted."""
    lab = Lab(config_of(settings, "train.steps=1"), [pair("p")])
    lab.at("checkpoint", lambda save, _: lambda: (save(), setattr(lab.service, "away", "refusing")))
    with pytest.raises(ServiceUnavailable):
        lab.trainer.train()


def test_a_step_that_is_not_finite_is_left_out(settings: list[str]) -> None:
    lab = Lab(config_of(settings), [not_finite("bad"), pair("good")])
    lab.trainer.load()
    before = lab.weights()
    lab.trainer.step()
    assert same(before, lab.weights())
    assert lab.trainer.policy.steps == 0
    assert lab.trainer.policy.optimizer.state == {}
    assert lab.executor.acks == [([], {"bad-good": "not_finite", "bad-bad": "not_finite"})]
    assert lab.service.published == []
    lab.trainer.step()
    assert not same(before, lab.weights())
    assert lab.executor.acks[1:] == [(["good-good", "good-bad"], {})]
    # No step took the first: a resume cannot want it.
    assert lab.executor.steps == [None, 1]
    assert lab.service.published == [(1, 1)]


def test_many_steps_in_a_row_that_are_not_finite_end_the_training(settings: list[str]) -> None:
    """A good one in between begins the count anew."""
    four = [not_finite(f"a{k}") for k in range(4)]
    five = [not_finite(f"b{k}") for k in range(5)]
    lab = Lab(config_of(settings), [*four, pair("good"), *five, pair("never")])
    with fails_with(TrainingError, "5 consecutive", "train.lr"):
        lab.trainer.train()
    assert lab.trainer.policy.steps == 1
    assert all(bool(torch.isfinite(p).all()) for p in lab.weights())
    assert len(lab.executor.acks) == 4 + 1 + 4


def test_a_batch_with_nothing_left_makes_no_step(settings: list[str]) -> None:
    lab = Lab(config_of(settings), [pair("odd", untrainable="x"), pair("unknown", version=77)])
    lab.trainer.load()
    lab.trainer.step()
    lab.trainer.step()
    assert lab.trainer.policy.steps == 0
    assert lab.executor.acks == [
        ([], {"odd-good": "untrainable", "odd-bad": "untrainable"}),
        # Weights that this run knows nothing of.
        ([], {"unknown-good": "stale", "unknown-bad": "stale"}),
    ]


def test_a_resume_goes_on_with_the_settings_of_its_own_start(settings: list[str]) -> None:
    first = Lab(config_of(settings, "train.steps=2"), [pair("a"), pair("b")])
    first.trainer.train()
    moments = moments_of(first.trainer.policy)
    more = ["train.steps=3", "train.lr=0.25", "train.betas=[0.5, 0.75]", "train.weight_decay=0.125"]
    again = Lab(config_of(settings, *more, "train.grad_clip=0.0625"), [pair("c")], before=first)
    again.trainer.load()
    # What it has learned so far stays.
    assert same(moments, moments_of(again.trainer.policy))
    assert same(first.weights(), again.weights())
    again.trainer.catch_up()
    again.trainer.step()
    (group,) = again.trainer.policy.optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.25, (0.5, 0.75), 0.125)
    taken = again.trainer.manifests.read(3).settings
    expected = {"lr": 0.25, "betas": [0.5, 0.75], "weight_decay": 0.125, "grad_clip": 0.0625}
    assert {name: taken[name] for name in expected} == expected


def test_the_version_of_an_engine_is_not_used_again(settings: list[str]) -> None:
    lab = Lab(config_of(settings, "train.steps=1"), [pair("a")], version=41)
    lab.trainer.train()
    # It has weights that this run knows nothing of, so it gets the policy's first.
    assert lab.service.published == [(42, 0), (43, 1)]


def test_a_resumed_run_outlives_the_checkpoint_that_it_came_from(settings: list[str]) -> None:
    """The tokenizer that it publishes and keeps must not be that folder's."""
    every = ["train.checkpoint_every=1", "train.keep_checkpoints=1"]
    first = Lab(config_of(settings, "train.steps=1", *every), [pair("a")])
    first.trainer.train()
    more = [pair(f"p{k}", version=k) for k in range(1, 4)]
    again = Lab(config_of(settings, "train.steps=4", *every), more, before=first)
    assert again.trainer.train()
    kept = [path.name for path in again.trainer.dir.checkpoints.glob("step-*")]
    assert kept == ["step-00000004"]
    assert again.manifests == [], "they go with their checkpoints"
    assert (again.trainer.dir.checkpoints / "step-00000004" / "tokenizer.json").is_file()
