"""A trainer that dies anywhere and is started again ends where one that lives on ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from any_agent.errors import Conflict, NotFound, TrainingError
from any_agent.workflow import Episode
from tests.support.errors import fails_with
from tests.support.trainer.episodes import pair, session
from tests.support.trainer.loop import Killed, Lab, config_of, killed, moments_of, outcome, same
from trainer.batch import TrainingBatch
from trainer.from_config import learning_rate
from trainer.manifests import Manifest, ManifestStore

STEPS = 5
RUN = (f"train.steps={STEPS}", "train.checkpoint_every=2", "rollout.eta=9")
UPDATES = (
    *RUN,
    *("train.lr_schedule=cosine", "train.warmup_steps=2", "train.min_lr_ratio=0.1"),
    *("train.minibatches=2", "train.epochs_per_batch=2", "train.kl_coef=0.1"),
    *("train.preset=gspo", "train.eps_low=0.5", "train.eps_high=0.5"),
)
"""Steps of four updates each, at other rates, with a loss that needs all inputs."""


def place(lab: Lab, boundary: str) -> tuple[Any, str, bool]:
    """The object and the method whose end (or begin: True) is the boundary."""
    trainer = lab.trainer
    return {
        "lease": (lab.executor, "prepare_batch", False),
        "manifest": (trainer.manifests, "write", False),
        "step": (trainer.policy, "step", False),
        "update": (trainer.policy, "_update", False),
        "published": (trainer.publisher, "publish", False),
        "before ack": (lab.executor, "ack", True),
        "ack": (lab.executor, "ack", False),
        "before checkpoint": (trainer, "save", True),
        "checkpoint": (trainer, "save", False),
    }[boundary]


def die_at(lab: Lab, boundary: str, when: int) -> None:
    load = lab.trainer.load

    def loaded() -> None:
        load()
        owner, name, before = place(lab, boundary)
        setattr(owner, name, killed(getattr(owner, name), when, before=before))

    lab.trainer.load = loaded  # type: ignore[method-assign]
    with pytest.raises(Killed):
        lab.trainer.train()


def episodes() -> list[Episode]:
    return [pair(f"p{k}", turns=1 + k % 3) for k in range(STEPS)]


def left_for(lab: Lab) -> list[Episode]:
    """What the ranks hand out again: sessions that no step took for good."""
    manifests = ManifestStore(lab.trainer.dir.manifests)
    taken = {id for step in manifests.steps() for id in manifests.read(step).sessions}
    taken |= lab.executor.settled
    return [e for e in episodes() if not {t.session_id for t in e} & taken]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["name"] == other["name"] == f"step-{STEPS:08d}"
    assert one["state"] == other["state"]
    assert one["tensors"].keys() == other["tensors"].keys()
    different = [k for k, t in one["tensors"].items() if not torch.equal(t, other["tensors"][k])]
    assert different == []


@pytest.fixture
def settings(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    return [f"root={tmp_path}", f"model.path={tiny_model_dir}", "train.lr=1e-3", "train.seed=1"]


@pytest.fixture(scope="module")
def uninterrupted(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("whole")
    base = [f"root={root}", f"model.path={tiny_model_dir}", "train.lr=1e-3", "train.seed=1"]
    config = config_of(base, *RUN)
    lab = Lab(config, episodes())
    assert lab.trainer.train()
    return outcome(lab)


@pytest.mark.parametrize("when", [1, 2, 3])
@pytest.mark.parametrize(
    "boundary",
    [
        "lease",
        "manifest",
        "step",
        "published",
        "before ack",
        "ack",
        "before checkpoint",
        "checkpoint",
    ],
)
@pytest.mark.service
def test_killed_at_each_boundary(
    settings: list[str], uninterrupted: dict[str, Any], boundary: str, when: int
) -> None:
    config = config_of(settings, *RUN)
    first = Lab(config, episodes())
    die_at(first, boundary, when)
    again = Lab(config, left_for(first), before=first)
    assert again.trainer.train()
    assert_same(uninterrupted, outcome(again))
    # Every session is acknowledged in the end, and metrics know each step once.
    acked = [id for lab in (first, again) for trained, _ in lab.executor.acks for id in trained]
    assert set(acked) == {t.session_id for e in episodes() for t in e}
    assert [line["step"] for line in again.metrics] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def uninterrupted_updates(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("updates")
    base = [f"root={root}", f"model.path={tiny_model_dir}", "train.lr=1e-3", "train.seed=1"]
    lab = Lab(config_of(base, *UPDATES), episodes())
    assert lab.trainer.train()
    train = lab.trainer.config.train
    rates = [learning_rate(train, step, STEPS) for step in range(1, STEPS + 1)]
    assert [line["learning_rate"] for line in lab.metrics] == rates
    assert len(set(rates)) == STEPS
    assert [line["updates"] for line in lab.metrics] == [4] * STEPS
    return outcome(lab)


@pytest.mark.parametrize(
    ("boundary", "when"),
    [("update", 1), ("update", 6), ("update", 12), ("step", 3), ("manifest", 2), ("checkpoint", 1)],
)
@pytest.mark.service
def test_killed_among_several_updates(
    settings: list[str], uninterrupted_updates: dict[str, Any], boundary: str, when: int
) -> None:
    first = Lab(config_of(settings, *UPDATES), episodes())
    die_at(first, boundary, when)
    again = Lab(config_of(settings, *UPDATES), left_for(first), before=first)
    assert again.trainer.train()
    assert_same(uninterrupted_updates, outcome(again))
    assert [line["learning_rate"] for line in again.metrics] == [
        learning_rate(again.trainer.config.train, step, STEPS) for step in range(1, STEPS + 1)
    ]


def test_killed_at_every_start(settings: list[str], uninterrupted: dict[str, Any]) -> None:
    """It dies in each life after one more step, and once in the replay."""
    config = config_of(settings, *RUN)
    lab = Lab(config, episodes())
    die_at(lab, "step", 2)
    for _ in range(3):
        lab = Lab(config, left_for(lab), before=lab)
        die_at(lab, "published", 1)
    lab = Lab(config, left_for(lab), before=lab)
    die_at(lab, "before ack", 1)
    lab = Lab(config, left_for(lab), before=lab)
    assert lab.trainer.train()
    assert_same(uninterrupted, outcome(lab))


@pytest.mark.parametrize("boundary", ["step", "checkpoint"])
def test_a_start_that_would_choose_other_passes_makes_the_same(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, boundary: str
) -> None:
    """A restart keeps the passes, as if a GPU had less free memory by then."""

    def lab(name: str, tokens: int, batches: list[Episode], before: Lab | None = None) -> Lab:
        monkeypatch.setattr("trainer.pass_runner.pass_tokens", lambda *_, **__: tokens)
        return Lab(config_of([*settings, f"trial={name}"], *RUN), batches, before=before)

    whole = lab("whole", 16, episodes())
    assert whole.trainer.train()
    other = lab("other", 64, episodes())
    assert other.trainer.train()
    first = lab("killed", 16, episodes())
    die_at(first, boundary, 1)
    again = lab("killed", 64, left_for(first), before=first)
    assert again.trainer.train()
    assert_same(outcome(whole), outcome(again))
    with pytest.raises(AssertionError):
        assert_same(outcome(whole), outcome(other))


def test_what_the_ranks_serve_already_is_not_published_again(settings: list[str]) -> None:
    """Calls under way would be interrupted for nothing."""
    config = config_of(settings, *RUN)
    first = Lab(config, episodes())
    die_at(first, "ack", 3)
    assert first.service.published == [(1, 1), (2, 2), (3, 3)]
    again = Lab(config, left_for(first), before=first)
    again.trainer.train()
    assert again.executor.replayed == [["p2-good", "p2-bad"]]
    assert again.service.published == [(4, 4), (5, 5)]
    # It may have died in the middle of an update, so nobody stays paused.
    assert again.service.resumed == 1
    assert again.executor.acks[0] == (["p2-good", "p2-bad"], {})


def test_a_long_resume_does_not_keep_the_rows_of_all_its_steps(settings: list[str]) -> None:
    config = config_of(settings, "train.steps=3", "train.checkpoint_every=9", "rollout.eta=9")
    first = Lab(config, episodes())
    die_at(first, "step", 3)
    again = Lab(config, [], before=first)
    settle, kept = again.trainer.settle, []

    def settled(batch: TrainingBatch, taken: Manifest, step: int | None) -> None:
        kept.append(batch)
        settle(batch, taken, step)

    again.trainer.settle = settled  # type: ignore[method-assign]
    assert again.trainer.train()
    assert [(bool(batch.trained), batch.rows) for batch in kept] == [(True, [])] * 3


def test_what_they_do_not_serve_is_published_as_a_new_version(settings: list[str]) -> None:
    config = config_of(settings, *RUN)
    first = Lab(config, episodes())
    die_at(first, "step", 3)
    again = Lab(config, left_for(first), before=first)
    again.trainer.train()
    assert again.service.published == [(3, 3), (4, 4), (5, 5)]
    # An engine from somebody else may hold anything under that number.
    more = ("train.steps=6", "engine.urls=http://e", "server.ranks=1", "train.checkpoint_every=2")
    other = Lab(config_of(settings, *more), [pair("q", version=5)], before=again)
    other.trainer.train()
    assert other.service.published == [(6, 5), (7, 6)]


def test_the_masks_of_a_step_are_its_own(settings: list[str]) -> None:
    """Neither a later eta nor what is known of versions by then changes it."""
    config = config_of(settings, "train.steps=3", "rollout.eta=1", "train.discount=0.5")
    script = [pair("a"), [*pair("b"), *pair("old", version=99)], pair("c", version=1)]
    first = Lab(config, script)
    die_at(first, "step", 2)
    manifest = ManifestStore(first.trainer.dir.manifests).read(2)
    assert manifest.rejected == {"old-good": "stale", "old-bad": "stale"}
    more = ("train.steps=3", "rollout.eta=0", "train.discount=1")
    again = Lab(config_of(settings, *more), [], before=first)
    again.trainer.load()
    again.trainer.catch_up()
    assert same(first.weights(), again.weights())
    assert same(moments_of(first.trainer.policy), moments_of(again.trainer.policy))
    assert again.executor.acks == [
        (["a-good", "a-bad"], {}),
        (["b-good", "b-bad"], manifest.rejected),
    ]
    # Each under its own step, so that a rank keeps it for as long as a resume may want it.
    assert again.executor.steps == [1, 2]


def test_a_repeated_step_has_the_settings_that_it_was_made_with(settings: list[str]) -> None:
    first = Lab(config_of(settings, *UPDATES), episodes())
    die_at(first, "step", 2)
    more = ["train.lr=1e-2", "train.betas=[0.5,0.5]", "train.weight_decay=0.5", "train.steps=9"]
    more += ["train.grad_clip=1e-3", "train.minibatches=1", "train.epochs_per_batch=3"]
    more += ["train.eps_low=0.01", "train.eps_high=0.01", "train.is_cap=1"]
    again = Lab(config_of(settings, *RUN, *more, "train.lr_schedule=linear"), [], before=first)
    again.trainer.load()
    again.trainer.catch_up()
    assert again.trainer.policy.steps == 2
    assert same(first.weights(), again.weights())
    assert same(moments_of(first.trainer.policy), moments_of(again.trainer.policy))


def test_the_rows_of_a_step_are_its_own(settings: list[str], tmp_path: Path) -> None:
    """Advantages, weights of tokens and penalties are those that the step was made with."""

    def script() -> list[Episode]:
        return [
            [*pair("a"), session("odd", 0.4, group="a", turns=3)],
            pair("b", turns=2),
            pair("c"),
        ]

    before = ("train.aggregation=session", "train.normalize_std=batch", "train.overlong_length=2")
    first = Lab(config_of(settings, "train.steps=3", *before), script())
    die_at(first, "step", 2)
    more = ("train.preset=rloo", "train.loss=grpo", "train.aggregation=turn")
    again = Lab(config_of(settings, "train.steps=3", *more), [], before=first)
    again.trainer.load()
    again.trainer.catch_up()
    assert same(first.weights(), again.weights())
    assert same(moments_of(first.trainer.policy), moments_of(again.trainer.policy))
    plain = Lab(config_of(settings, f"root={tmp_path / 'plain'}", "train.steps=2"), script())
    plain.trainer.train()
    assert not same(first.weights(), plain.weights()), "these settings matter"


def test_a_batch_that_is_not_the_same_stops_the_resume(settings: list[str]) -> None:
    config = config_of(settings, *RUN)
    first = Lab(config, episodes())
    die_at(first, "step", 2)
    changed = first.executor.journal["p1-bad"]
    for interaction in changed.interactions:
        interaction.untrainable_reason = "undelivered"
    again = Lab(config, [], before=first)
    with fails_with(TrainingError, "step 2", "p1-bad"):
        again.trainer.train()
    assert again.executor.acks == []
    del first.executor.journal["p0-good"]
    with fails_with(Conflict, "p0-good"):
        Lab(config, [], before=first).trainer.train()


def test_a_run_goes_on_where_a_rank_lost_its_journal(settings: list[str]) -> None:
    """It is gone with its machine: what came before its first session is made again, as ever."""
    config = config_of(settings, *RUN, "train.checkpoint_every=9")
    first = Lab(config, episodes())
    die_at(first, "ack", 4)
    again = Lab(config, [pair("q0"), pair("q1"), pair("q2")], before=first)
    again.executor.lost = {"p2-bad"}
    said: list[str] = []
    again.trainer.report.say = said.append
    assert again.trainer.train()
    assert again.executor.replayed == [[f"p{k}-good", f"p{k}-bad"] for k in range(3)]
    ids = [f"{name}-{how}" for name in ("p0", "p1", "q0", "q1", "q2") for how in ("good", "bad")]
    assert [id for trained, _ in again.executor.acks for id in trained] == ids
    assert list(again.trainer.consumed) == ids, "none of them has an effect twice"
    # Versions of the history that was given up are not used again.
    assert again.service.published == [(5, 2), (6, 3), (7, 4), (8, 5)]
    manifests = again.trainer.dir.manifests
    assert said[0] == again.trainer.dir.waiting.read_text().strip()
    Lab(again.trainer.config, [], before=again).trainer.load()
    assert not again.trainer.dir.waiting.exists(), "what an earlier start waited for is no alarm"
    assert said[0].startswith("trainer   steps 3 to 4 cannot be repeated, because a rank")
    assert "no session 'p2-bad'" in said[0] and "resuming at step 2;" in said[0]
    assert sorted(path.name for path in manifests.glob("lost-*")) == [
        f"lost-{step:08d}.json" for step in (3, 4)
    ]
    # The fourth step had not been told of when it died.
    assert again.manifests == []
    assert [line["step"] for line in again.metrics] == [1, 2, 3, 3, 4, 5]


def test_other_errors_of_a_step_made_again_give_nothing_up(settings: list[str]) -> None:
    config = config_of(settings, *RUN, "train.checkpoint_every=9")
    first = Lab(config, episodes())
    die_at(first, "ack", 2)
    again = Lab(config, [], before=first)

    def elsewhere(*_: Any, **__: Any) -> None:
        raise NotFound("none of the 1 ranks has the session")

    again.executor.replay = elsewhere  # type: ignore[method-assign,assignment]
    with pytest.raises(NotFound):
        again.trainer.train()
    assert again.manifests == [1, 2]


def test_a_step_that_was_left_out_is_not_made_again(settings: list[str]) -> None:
    config = config_of(settings, *RUN, "train.steps=1")
    first = Lab(config, [pair("bad", logprob=math.nan)])
    first.trainer.load()
    first.trainer.step()
    assert first.manifests == []
    # Now it is killed before it knows that the step is not finite.
    first = Lab(config, [pair("bad", logprob=math.nan)])
    die_at(first, "manifest", 1)
    assert first.manifests == [1]
    again = Lab(config, [pair("good")], before=first)
    again.trainer.train()
    assert again.executor.acks == [
        ([], {"bad-good": "not_finite", "bad-bad": "not_finite"}),
        (["good-good", "good-bad"], {}),
    ]


def test_a_step_that_fails_every_time_is_told_with_what_to_do(
    settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(settings, *RUN, "train.steps=1")

    def failing(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    first = Lab(config, [pair("large")])
    for lab in (first, Lab(config, [], before=first)):  # when it is made again, too
        caplog.clear()
        load = lab.trainer.load

        def loaded(lab: Lab = lab, load: Callable[[], None] = load) -> None:
            load()
            lab.trainer.policy.step = failing  # type: ignore[method-assign,assignment]

        lab.trainer.load = loaded  # type: ignore[method-assign]
        with pytest.raises(torch.OutOfMemoryError):
            lab.trainer.train()
        manifest = lab.trainer.dir.manifests / "step-00000001.json"
        assert "step 1 failed" in caplog.text and str(manifest) in caplog.text
        assert "lower train.micro_batch_tokens" in caplog.text
    # The remedy: without the file it goes on.
    manifest.unlink()
    assert Lab(config, [pair("good")], before=first).trainer.train()


def test_a_finished_run_that_is_started_again(settings: list[str]) -> None:
    config = config_of(settings, *RUN)
    first = Lab(config, episodes())
    assert first.trainer.train()
    saved = first.trainer.checkpoint
    assert saved is not None
    written = saved.stat().st_mtime_ns
    again = Lab(config, [pair("late")], before=first)
    assert again.trainer.train()
    assert again.service.states == [("finished", STEPS)]
    assert again.service.published == []
    assert not again.executor.begun
    assert saved.stat().st_mtime_ns == written
    # With more steps to make it goes on.
    more = Lab(config_of(settings, *RUN, f"train.steps={STEPS + 1}"), [pair("late")], before=first)
    assert more.trainer.train()
    assert more.service.states[0] == ("training", STEPS)
    assert more.executor.acks == [(["late-good", "late-bad"], {})]


def test_fewer_steps_than_were_made_are_no_reason_to_forget_the_rest(settings: list[str]) -> None:
    first = Lab(config_of(settings, *RUN), episodes())
    die_at(first, "ack", 4)
    short = Lab(config_of(settings, *RUN, "train.steps=3"), [], before=first)
    assert short.trainer.train()
    assert short.trainer.policy.steps == 3
    again = Lab(config_of(settings, *RUN), [pair("p4", turns=2)], before=first)
    again.trainer.train()
    assert again.executor.replayed == [["p3-good", "p3-bad"]]


def test_rejected_sessions_of_a_step_are_consumed_too(settings: list[str]) -> None:
    """Otherwise they would stand in a second baseline."""
    config = config_of(settings, *RUN)
    lab = Lab(config, [[*pair("a"), *pair("odd", untrainable="x")]])
    lab.trainer.train()
    assert lab.trainer.consumed == {
        "a-good": (1, None),
        "a-bad": (1, None),
        "odd-good": (1, "untrainable"),
        "odd-bad": (1, "untrainable"),
    }
    again = Lab(config, [], before=lab)
    again.trainer.load()
    assert again.trainer.consumed == lab.trainer.consumed
    assert again.trainer.executor is not None
    assert replace(pair("a")[0]).session_id in again.trainer.consumed


def test_weights_that_a_rank_lost_are_given_to_it_again(settings: list[str]) -> None:
    """Its engine was restarted with old ones, so nothing that it samples can be trained on."""
    config = config_of(settings, "rollout.eta=0", "train.steps=3")
    lab = Lab(config, [pair("a"), pair("b", version=1), pair("stale", version=1)])
    lab.trainer.load()
    lab.trainer.catch_up()
    lab.trainer.step()
    lab.trainer.step()
    lab.service.version = 1
    lab.trainer.step()
    assert lab.executor.acks[-1] == ([], {"stale-good": "stale", "stale-bad": "stale"})
    assert lab.service.published == [(1, 1), (2, 2), (2, 2)]


def test_the_ranks_hear_which_checkpoint_is_the_oldest(settings: list[str]) -> None:
    options = ["train.checkpoint_every=1", "train.keep_checkpoints=2", "rollout.eta=9"]
    lab = Lab(config_of(settings, *options, "train.steps=4"), [pair(f"p{k}") for k in range(4)])
    assert lab.trainer.train()
    # Pruned first, told then: what a rank may drop, no checkpoint needs.
    assert lab.service.oldest == [None, 1, 1, 2, 3, 3]
    again = Lab(config_of(settings, *options, "train.steps=5"), [pair("p4")], before=lab)
    assert again.trainer.train()
    assert again.service.oldest == [3, 4, 4]


def test_the_oldest_checkpoint_is_enough_once_the_ranks_dropped_what_it_holds(
    settings: list[str],
) -> None:
    options = ["train.checkpoint_every=2", "train.keep_checkpoints=2", "train.steps=6"]
    config = config_of(settings, *options, "rollout.eta=9")
    first = Lab(config, [pair(f"p{k}") for k in range(6)])
    assert first.trainer.train()
    oldest = first.service.oldest[-1]
    assert oldest is not None and oldest == 4
    # As a rank's retention does: steps up to the oldest checkpoint's are not needed.
    steps = {id: taken.step for id, taken in first.trainer.consumed.items()}
    for id, step in steps.items():
        assert step is not None
        if step <= oldest:
            del first.executor.journal[id]
    # The newest checkpoint is lost.
    newest = first.trainer.checkpoint
    assert newest is not None and newest.name == "step-00000006"
    (newest / "manifest.json").unlink()
    again = Lab(config, [], before=first)
    assert again.trainer.train()
    assert again.executor.replayed == [["p4-good", "p4-bad"], ["p5-good", "p5-bad"]]
    assert same(first.weights(), again.weights())
