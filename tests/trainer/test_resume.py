"""A trainer that dies anywhere and is started again ends where one that lives on ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from any_agent.errors import Conflict, NotFound, TrainingError
from any_agent.workflow import Episode
from tests.support.errors import fails_with
from tests.support.trainer.episodes import pair, session
from tests.support.trainer.loop import (
    RUN,
    STEPS,
    Lab,
    assert_same_outcome,
    assert_same_policy,
    config_of,
    episodes,
    outcome,
    same,
    settings_of,
)
from trainer.batch import TrainingBatch
from trainer.from_config import learning_rate

UPDATES = (
    *RUN,
    *("train.lr_schedule=cosine", "train.warmup_steps=2", "train.min_lr_ratio=0.1"),
    *("train.minibatches=2", "train.epochs_per_batch=2", "train.kl_coef=0.1"),
    *("train.preset=gspo", "train.eps_low=0.5", "train.eps_high=0.5"),
)
"""Steps of four updates each, at other rates, with a loss that needs all inputs."""
BOUNDARIES = ("lease", "manifest", "step", "published", "before ack", "ack", "before checkpoint")


@pytest.mark.parametrize("when", [1, 2, 3])
@pytest.mark.parametrize("boundary", [*BOUNDARIES, "checkpoint"])
@pytest.mark.service
def test_a_trainer_killed_at_any_boundary_ends_as_if_it_had_lived(
    settings: list[str], uninterrupted: dict[str, Any], boundary: str, when: int
) -> None:
    first = Lab(config_of(settings, *RUN), episodes()).die(boundary, when)
    again = first.again()
    assert again.trainer.train()
    assert_same_outcome(uninterrupted, outcome(again))
    # Every session is acknowledged in the end, and metrics know each step once.
    acked = [id for lab in (first, again) for trained, _ in lab.executor.acks for id in trained]
    assert set(acked) == {t.session_id for e in episodes() for t in e}
    assert [line["step"] for line in again.metrics] == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def uninterrupted_updates(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    base = settings_of(tmp_path_factory.mktemp("updates"), tiny_model_dir)
    lab = Lab(config_of(base, *UPDATES), episodes())
    assert lab.trainer.train()
    assert [line["updates"] for line in lab.metrics] == [4] * STEPS
    return outcome(lab)


@pytest.mark.parametrize(
    ("boundary", "when"),
    [("update", 1), ("update", 6), ("update", 12), ("step", 3), ("manifest", 2), ("checkpoint", 1)],
)
@pytest.mark.service
def test_a_trainer_killed_among_several_updates_ends_as_if_it_had_lived(
    settings: list[str], uninterrupted_updates: dict[str, Any], boundary: str, when: int
) -> None:
    again = Lab(config_of(settings, *UPDATES), episodes()).die(boundary, when).again()
    assert again.trainer.train()
    assert_same_outcome(uninterrupted_updates, outcome(again))
    train = again.trainer.config.train
    rates = [learning_rate(train, step, STEPS) for step in range(1, STEPS + 1)]
    assert [line["learning_rate"] for line in again.metrics] == rates
    assert len(set(rates)) == STEPS


def test_a_trainer_killed_at_every_start_ends_as_if_it_had_lived(
    settings: list[str], uninterrupted: dict[str, Any]
) -> None:
    """It dies in each life after one more step, and once in the replay."""
    lab = Lab(config_of(settings, *RUN), episodes()).die("step", 2)
    for _ in range(3):
        lab = lab.again().die("published")
    lab = lab.again().die("before ack").again()
    assert lab.trainer.train()
    assert_same_outcome(uninterrupted, outcome(lab))


def test_a_start_that_would_choose_other_passes_makes_the_same(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart keeps the passes, as if a GPU had less free memory by then."""

    def choose(tokens: int) -> None:
        monkeypatch.setattr("trainer.pass_runner.pass_tokens", lambda *_, **__: tokens)

    def whole(tokens: int) -> dict[str, Any]:
        choose(tokens)
        lab = Lab(config_of([*settings, f"trial=whole-{tokens}"], *RUN), episodes())
        assert lab.trainer.train()
        return outcome(lab)

    expected, other = whole(16), whole(64)
    for boundary in ("step", "checkpoint"):
        choose(16)
        first = Lab(config_of([*settings, f"trial={boundary}"], *RUN), episodes()).die(boundary)
        choose(64)
        again = first.again()
        assert again.trainer.train()
        assert_same_outcome(expected, outcome(again))
    with pytest.raises(AssertionError):
        assert_same_outcome(expected, other)


def test_what_the_ranks_serve_already_is_not_published_again(settings: list[str]) -> None:
    """Calls under way would be interrupted for nothing."""
    first = Lab(config_of(settings, *RUN), episodes()).die("ack", 3)
    assert first.service.published == [(1, 1), (2, 2), (3, 3)]
    again = first.again()
    again.trainer.train()
    assert again.executor.replayed == [["p2-good", "p2-bad"]]
    assert again.service.published == [(4, 4), (5, 5)]
    # It may have died in the middle of an update, so nobody stays paused.
    assert again.service.resumed == 1
    assert again.executor.acks[0] == (["p2-good", "p2-bad"], {})


def test_what_the_ranks_do_not_serve_is_published_as_a_new_version(settings: list[str]) -> None:
    again = Lab(config_of(settings, *RUN), episodes()).die("step", 3).again()
    again.trainer.train()
    assert again.service.published == [(3, 3), (4, 4), (5, 5)]
    # An engine from somebody else may hold anything under that number.
    more = ("train.steps=6", "engine.urls=http://e", "server.ranks=1", "train.checkpoint_every=2")
    other = Lab(config_of(settings, *more), [pair("q", version=5)], before=again)
    other.trainer.train()
    assert other.service.published == [(6, 5), (7, 6)]


def test_a_long_resume_does_not_keep_the_rows_of_all_its_steps(settings: list[str]) -> None:
    config = config_of(settings, "train.steps=3", "train.checkpoint_every=9", "rollout.eta=9")
    again = Lab(config, [], before=Lab(config, episodes()).die("step", 3))
    settle, kept = again.trainer.settle, []

    def settled(batch: TrainingBatch, *given: Any) -> None:
        kept.append(batch)
        settle(batch, *given)

    again.trainer.settle = settled  # type: ignore[method-assign]
    assert again.trainer.train()
    assert [(bool(batch.trained), batch.rows) for batch in kept] == [(True, [])] * 3


def uneven() -> list[Episode]:
    return [[*pair("a"), session("odd", 0.4, group="a", turns=3)], pair("b", turns=2), pair("c")]


def cut_and_named() -> list[Episode]:
    """Some outputs were cut off, and the last turns are another agent's."""
    made = uneven()
    for episode in made:
        for trajectory in episode:
            *_, last = trajectory.interactions
            last.request = {"role": "critic"}
        for node in episode[0].interactions:
            node.finish_reason = "length"
    return made


OWN: dict[str, tuple[list[Episode], tuple[str, ...], tuple[str, ...]]] = {
    "masks": (
        [pair("a"), [*pair("b"), *pair("old", version=99)], pair("c", version=1)],
        ("rollout.eta=1", "train.discount=0.5"),
        ("rollout.eta=0", "train.discount=1"),
    ),
    "settings of the optimizer and the loss": (
        episodes(),
        UPDATES,
        (
            *("train.lr=1e-2", "train.betas=[0.5,0.5]", "train.weight_decay=0.5"),
            *("train.grad_clip=1e-3", "train.minibatches=1", "train.epochs_per_batch=3"),
            *("train.eps_low=0.01", "train.eps_high=0.01", "train.is_cap=1", "rollout.eta=9"),
        ),
    ),
    "rows": (
        uneven(),
        ("train.aggregation=session", "train.normalize_std=batch", "train.overlong_length=2"),
        ("train.preset=rloo", "train.loss=grpo", "train.aggregation=turn"),
    ),
    "outputs that were cut, and roles": (
        cut_and_named(),
        ("train.mask_truncated=true", "train.group_by=role"),
        (),
    ),
    "divergence in the reward": (
        uneven(),
        ("train.preset=reinforce_pp", "train.kl_reward_coef=0.5"),
        ("train.preset=reinforce_pp",),
    ),
}
"""Episodes, the settings that their steps were made with, and those of the start after."""
REFUSED = {
    "masks": [{}, {"old-good": "stale", "old-bad": "stale"}],
    "outputs that were cut, and roles": [{"a-good": "truncated"}, {"b-good": "truncated"}],
}
"""The sessions that these steps leave out."""


@pytest.mark.parametrize("what", OWN)
def test_a_repeated_step_uses_the_settings_that_it_was_made_with(
    settings: list[str], tmp_path: Path, what: str
) -> None:
    """Whatever the settings, and what is known of versions, are by then."""
    script, before, after = OWN[what]
    few = (*settings, "train.steps=3", "train.checkpoint_every=9")
    first = Lab(config_of([*few, *before], *few[-2:]), list(script)).die("step", 2)
    again = Lab(config_of([*few, *after]), [], before=first)
    again.trainer.load()
    again.trainer.catch_up()
    assert again.trainer.policy.steps == 2
    assert_same_policy(first, again)
    assert again.trainer.policy.reference is None, "the steps from here on have none"
    assert [refused for _, refused in again.executor.acks] == REFUSED.get(what, [{}, {}])
    # Each under its own step, so that a rank keeps it for as long as a resume may want it.
    assert again.executor.steps == [1, 2]
    plain = Lab(config_of([*few, *after, f"root={tmp_path / 'plain'}", "train.steps=2"]), script)
    plain.trainer.train()
    assert not same(first.weights(), plain.weights()), "these settings matter"


def test_a_batch_that_is_not_the_same_stops_the_resume(settings: list[str]) -> None:
    config = config_of(settings, *RUN)
    first = Lab(config, episodes()).die("step", 2)
    for interaction in first.executor.journal["p1-bad"].interactions:
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
    first = Lab(config, episodes()).die("ack", 4)
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
    assert "steps 3 to 4" in said[0] and "'p2-bad'" in said[0] and "step 2;" in said[0]
    assert said[0] == again.trainer.dir.waiting.read_text().strip()
    Lab(again.trainer.config, [], before=again).trainer.load()
    assert not again.trainer.dir.waiting.exists(), "what an earlier start waited for is no alarm"
    lost = sorted(path.name for path in again.trainer.dir.manifests.glob("lost-*"))
    assert lost == ["lost-00000003.json", "lost-00000004.json"]
    # The fourth step had not been told of when it died.
    assert again.manifests == []
    assert [line["step"] for line in again.metrics] == [1, 2, 3, 3, 4, 5]


def test_other_errors_of_a_step_made_again_give_nothing_up(settings: list[str]) -> None:
    config = config_of(settings, *RUN, "train.checkpoint_every=9")
    again = Lab(config, [], before=Lab(config, episodes()).die("ack", 2))

    def elsewhere(*_: Any, **__: Any) -> None:
        raise NotFound("none of the 1 ranks has the session")

    again.executor.replay = elsewhere  # type: ignore[method-assign,assignment]
    with pytest.raises(NotFound):
        again.trainer.train()
    assert again.manifests == [1, 2]


def test_a_step_that_was_left_out_is_not_made_again(settings: list[str]) -> None:
    """It was killed before it knew that the step is not finite."""
    config = config_of(settings, *RUN, "train.steps=1")
    first = Lab(config, [pair("bad", logprob=math.nan)]).die("manifest")
    assert first.manifests == [1]
    again = Lab(config, [pair("good")], before=first)
    again.trainer.train()
    assert again.executor.acks == [
        ([], {"bad-good": "not_finite", "bad-bad": "not_finite"}),
        (["good-good", "good-bad"], {}),
    ]


def test_a_step_that_fails_every_time_goes_on_without_its_manifest(
    settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(settings, *RUN, "train.steps=1")

    def failing(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    first = Lab(config, [pair("large")])
    for lab in (first, Lab(config, [], before=first)):  # when it is made again, too
        caplog.clear()
        lab.at("step", lambda *_: failing)
        with pytest.raises(torch.OutOfMemoryError):
            lab.trainer.train()
        manifest = lab.trainer.dir.manifests / "step-00000001.json"
        assert str(manifest) in caplog.text and "train.micro_batch_tokens" in caplog.text
    manifest.unlink()
    assert Lab(config, [pair("good")], before=first).trainer.train()


def test_a_finished_run_that_is_started_again_makes_only_further_steps(settings: list[str]) -> None:
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
    more = Lab(config_of(settings, *RUN, f"train.steps={STEPS + 1}"), [pair("late")], before=first)
    assert more.trainer.train()
    assert more.service.states[0] == ("training", STEPS)
    assert more.executor.acks == [(["late-good", "late-bad"], {})]


def test_fewer_steps_than_were_made_are_no_reason_to_forget_the_rest(settings: list[str]) -> None:
    first = Lab(config_of(settings, *RUN), episodes()).die("ack", 4)
    short = Lab(config_of(settings, *RUN, "train.steps=3"), [], before=first)
    assert short.trainer.train()
    assert short.trainer.policy.steps == 3
    again = Lab(config_of(settings, *RUN), [pair("p4", turns=2)], before=first)
    again.trainer.train()
    assert again.executor.replayed == [["p3-good", "p3-bad"]]


def test_rejected_sessions_of_a_step_do_not_come_again_after_a_resume(settings: list[str]) -> None:
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


def test_the_oldest_checkpoint_is_enough_once_the_ranks_dropped_what_it_holds(
    settings: list[str],
) -> None:
    options = ["train.checkpoint_every=2", "train.keep_checkpoints=2", "train.steps=6"]
    config = config_of(settings, *options, "rollout.eta=9")
    first = Lab(config, [pair(f"p{k}") for k in range(6)])
    assert first.trainer.train()
    # Pruned first, told then: what a rank may drop, no checkpoint needs.
    assert first.service.oldest == [None, 2, 2, 4, 4]
    # As a rank's retention does: steps up to the oldest checkpoint's are not needed.
    for id, taken in first.trainer.consumed.items():
        assert taken.step is not None
        if taken.step <= 4:
            del first.executor.journal[id]
    # The newest checkpoint is lost.
    newest = first.trainer.checkpoint
    assert newest is not None and newest.name == "step-00000006"
    (newest / "manifest.json").unlink()
    again = Lab(config, [], before=first)
    assert again.trainer.train()
    assert again.service.oldest[0] == 4
    assert again.executor.replayed == [["p4-good", "p4-bad"], ["p5-good", "p5-bad"]]
    assert same(first.weights(), again.weights())
