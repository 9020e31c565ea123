"""Groups that teach nothing: how they are counted, and what external agents' trainer says."""

from __future__ import annotations

from pathlib import Path

import pytest

from any_agent.config import TrainConfig
from any_agent.workflow import Episode
from tests.support.trainer.episodes import pair, session
from tests.support.trainer.loop import Lab, config_of
from trainer import loop
from trainer.batch import ZeroVarianceGroups, session_rewards


def alike(reward: float) -> Episode:
    return [session(f"s{k}", reward) for k in range(4)]


def test_a_row_of_them() -> None:
    dull = ZeroVarianceGroups(TrainConfig())  # type: ignore[call-arg]
    assert [dull.reject_reason(alike(0.25)) for _ in range(3)] == ["zero_variance"] * 3
    dull.count("not_accepted")
    assert dull.consecutive == 4
    assert str(dull) == (
        "4 groups in a row had nothing to learn from (3 zero_variance, 1 not_accepted): all runs "
        "of an item score the same, in the last group 0.25"
    )
    assert dull.reject_reason(pair("varied")) is None
    assert dull.consecutive == 0


def test_equal_outcomes_of_unequal_length_have_nothing_to_compare() -> None:
    """The penalty of a long output changes rewards, not whether a group is solved."""
    length = {"overlong_length": 2, "overlong_buffer": 1}
    config = TrainConfig(**length)  # type: ignore[call-arg, arg-type]
    group = alike(1.0)
    group[0] = session("s0", 1.0, output=(8,))
    scores = {session_rewards(one, config).score for one in group}
    assert len(scores) == 2
    assert ZeroVarianceGroups(config).reject_reason(group) == "zero_variance"


def test_agents_outside_may_go_on_and_a_person_is_told_why_nothing_happens(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_ANNOUNCE_INTERVAL", 0.01)
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
            lab.trainer._zero_variance.reject_reason(alike(0.0))
        raise TimeoutError("0 of 64 sessions came")

    lab.executor.prepare_batch = nothing_comes  # type: ignore[method-assign]
    assert not lab.trainer.train()
    told = [line for line in said if "in a row" in line]
    assert [line.split()[1] for line in told] == ["10", "15"]
    assert told[-1].endswith("in the last group 0. Other tasks or rewards would help")
    # So that a console shows it, too.
    shown = lab.trainer.dir.waiting.read_text().splitlines()
    assert shown == ["waiting   for trajectories: 0 of 64 sessions came", told[-1]]
