"""Groups that teach nothing: how they are counted, and what external agents' trainer says."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.config import TrainConfig, load_config
from any_agent.workflow import Episode
from tests.support.trainer.episodes import pair, session
from tests.support.trainer.loop import Lab, config_of
from trainer import loop
from trainer.batch import ZeroVarianceGroups, session_rewards, training_batch


def alike(reward: float) -> Episode:
    return [session(f"s{k}", reward) for k in range(4)]


def test_groups_that_teach_nothing_are_counted() -> None:
    dull = ZeroVarianceGroups(TrainConfig())  # type: ignore[call-arg]
    assert [dull.reject_reason(alike(0.25)) for _ in range(3)] == ["zero_variance"] * 3
    dull.count("not_accepted")
    assert dull.consecutive == 4
    assert "(3 zero_variance, 1 not_accepted)" in str(dull) and str(dull).endswith("0.25")
    assert dull.reject_reason(pair("varied")) is None
    assert dull.consecutive == 0


def test_scores_since_a_step_include_sessions_that_teach_nothing() -> None:
    """The trained groups' mean hides that all others are solved."""
    dull = ZeroVarianceGroups(TrainConfig())  # type: ignore[call-arg]
    assert dull.scores.read() == {"reward": None, "sessions": 0, "dull": 0}
    for _ in range(3):
        dull.reject_reason(alike(1.0))
    dull.reject_reason(pair("varied"))
    dull.refuse(pair("unwanted"), "not_accepted")
    mean = (3 * 4 * 1.0 + 2 * 1.0) / 16
    assert dull.scores.read() == {"reward": mean, "sessions": 16, "dull": 12}
    assert dull.scores.read(take=True) == {"reward": mean, "sessions": 16, "dull": 12}
    assert dull.scores.read()["sessions"] == 0


def test_a_notice_tells_that_most_of_the_last_groups_teach_nothing() -> None:
    """A group that differs now and then makes a step, after a long wait."""
    dull = ZeroVarianceGroups(TrainConfig())  # type: ignore[call-arg]
    for _ in range(3):
        for _ in range(5):
            assert dull.reject_reason(alike(1.0)) == "zero_variance"
        assert dull.reject_reason(pair("varied")) is None
    assert dull.consecutive == 0
    assert dull.notice is not None and "15 of the last 18 groups" in dull.notice
    for _ in range(8):
        assert dull.reject_reason(pair("varied")) is None
    assert dull.notice is None


@pytest.mark.parametrize("fate", ["drop", "keep"])
def test_groups_without_variance_are_dropped_or_kept_as_the_settings_say(fate: str) -> None:
    # By the text of a file or a command line, where some words are no texts.
    settings = ["model.path=x", f"train.dynamic_sampling={fate}"]
    config = load_config(None, settings, environ={}).train
    assert ZeroVarianceGroups(config).reject_reason(alike(0.25)) is None
    dull, varied = alike(0.25), pair("varied")
    # Unequal lengths make no lesson of it.
    dull[0] = session("s0", 0.25, output=(8,))
    config = config.model_copy(
        update={"overlong_length": 2, "overlong_buffer": 1, "overlong_penalty": 1.0}
    )
    batch = training_batch([dull, varied], config, step=0, eta=2, step_of_version={0: 0})
    assert len(batch.scores) == len(dull) + len(varied)
    *alone, good, bad = [float(row["advantages"].max()) for row in batch.rows]
    assert good == -bad != 0
    if fate == "drop":
        assert batch.rejected == {one.session_id: "zero_variance" for one in dull}
        assert not alone and len(batch.trained) == 2
    else:
        assert not batch.rejected and len(alone) == len(dull)


def test_equal_outcomes_of_unequal_length_have_nothing_to_compare() -> None:
    """The penalty of a long output changes rewards, not whether a group is solved."""
    length = {"overlong_length": 2, "overlong_buffer": 1}
    config = TrainConfig(**length)  # type: ignore[call-arg, arg-type]
    group = alike(1.0)
    group[0] = session("s0", 1.0, output=(8,))
    scores = {session_rewards(one, config).score for one in group}
    assert len(scores) == 2
    assert ZeroVarianceGroups(config).reject_reason(group) == "zero_variance"


def test_a_trainer_that_waits_tells_people_that_groups_teach_nothing(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "ANNOUNCE_INTERVAL", 0.01)
    monkeypatch.setattr(loop, "FIRST_ANNOUNCE", 0.005)
    lab = Lab(config_of([f"root={tmp_path}", f"model.path={tiny_model_dir}"]), [])
    said: list[str] = []
    lab.trainer.report.say = said.append
    minutes = 0

    def nothing_comes(timeout: float) -> list[Episode]:
        """A few more of them every minute, and then Ctrl-C."""
        nonlocal minutes
        minutes += 1
        if minutes == 4:
            raise InterruptedError
        for _ in range(5):
            lab.trainer.source.zero_variance.reject_reason(alike(0.0))
        raise TimeoutError("0 of 64 sessions came")

    lab.executor.prepare_batch = nothing_comes  # type: ignore[method-assign]
    assert not lab.trainer.train()
    told = [line for line in said if "in a row" in line]
    assert [line.split()[1] for line in told] == ["10", "15"]
    # The first seconds are usual; `waiting` is what an alarm is made of.
    assert [line.split()[0] for line in said if "0 of 64" in line] == ["trainer", *["waiting"] * 2]
    assert "in the last group: 0. Other tasks or rewards would help" in told[-1]
    # So that a console shows it, too.
    shown = lab.trainer.dir.waiting.read_text().splitlines()
    assert shown == ["waiting   for trajectories: 0 of 64 sessions came", told[-1]]
