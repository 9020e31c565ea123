"""The curve says what it shows: named axes, the steps' rewards, accuracies where they belong."""

from __future__ import annotations

from any_agent.demo.look_back import draw
from tests.support.demo import step
from tests.support.errors import fails_with


def test_the_curve_has_rewards_by_step_and_accuracies_at_its_ends() -> None:
    steps = [step(k, reward=k / 10) for k in (1, 2, 3)]
    figure = draw(steps, before=0.25, after=0.9, title="seed 0")
    (axes,) = figure.axes
    rewards, accuracies = axes.lines
    assert [tuple(xy) for xy in rewards.get_xydata()] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert [tuple(xy) for xy in accuracies.get_xydata()] == [(0, 0.25), (3, 0.9)]
    assert accuracies.get_linestyle() == "None", "nothing is known between the two"
    assert "step" in axes.get_xlabel() and "reward" in axes.get_ylabel()
    assert {text.get_text() for text in axes.texts} == {"25.0%", "90.0%"}
    assert axes.get_title() == "seed 0"


def test_a_curve_needs_steps() -> None:
    with fails_with(ValueError, "step"):
        draw([], before=0.0, after=0.0, title="")
