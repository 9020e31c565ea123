"""What an evaluation makes of its runs' results."""

from __future__ import annotations

import pytest

from any_agent.sdk import RunResult, RunResults
from any_agent.sdk.evaluation import Evaluation


def result(item: int, member: int, reward: float | None, **fields: object) -> RunResult:
    state = {"state": "evaluated", "version": 3} | fields
    return RunResult(item=item, epoch=0, member=member, reward=reward, **state)  # type: ignore[arg-type]


def failed(item: int, member: int, code: str = "agent_failed") -> RunResult:
    return result(item, member, None, state="failed", code=code, error="no", version=None)


RESULTS = RunResults(
    [
        *(result(0, k, reward, task_id="first") for k, reward in enumerate([1.0, 0.0, 0.0, 1.0])),
        *(result(1, k, reward, task_id="run-x-0-1") for k, reward in enumerate([0.0] * 4)),
        *(result(2, 0, 1.0), result(2, 1, 0.5), failed(2, 2), failed(2, 3, "agent_timeout")),
        *(failed(3, k) for k in range(4)),
    ],
    run="run-x",
)


def test_failed_runs_are_left_out() -> None:
    found = Evaluation(RESULTS, runs=4)
    assert found.scores == {0: [1, 0, 0, 1], 1: [0, 0, 0, 0], 2: [1, 0.5], 3: []}
    assert found.failed == {"agent_failed": 5, "agent_timeout": 1}
    assert found.describe_failures() == "6 runs failed (5 agent_failed, 1 agent_timeout): left out"
    assert found.tasks == {0: "first"}
    reward = found.reward
    assert reward is not None
    assert (reward.mean, reward.items) == (pytest.approx((0.5 + 0 + 0.75) / 3), 3)


def test_pass_at_k_is_over_items_with_as_many_runs() -> None:
    found = Evaluation(RESULTS, runs=4)
    one, two, four = (found.pass_at(k) for k in (1, 2, 4))
    assert one is not None and two is not None and four is not None
    assert (one.mean, one.items) == (pytest.approx((0.5 + 0 + 0.5) / 3), 3)
    # Of 4 runs with 2 that pass: 1 - C(2, 2) / C(4, 2).
    assert (two.mean, two.items) == (pytest.approx((5 / 6 + 0 + 1) / 3), 3)
    assert (four.mean, four.items) == (0.5, 2)


def test_a_run_passes_if_its_reward_reaches_the_threshold() -> None:
    found = Evaluation(RESULTS, runs=4, threshold=0.5).pass_at(1)
    assert found is not None and found.mean == pytest.approx((0.5 + 0 + 1) / 3)


def test_failed_runs_count_with_the_score_given_for_them() -> None:
    found = Evaluation(RESULTS, runs=4, failed_score=0.0)
    assert found.scores[2] == [1, 0.5, 0, 0] and found.scores[3] == [0, 0, 0, 0]
    assert found.reward is not None and found.reward.mean == pytest.approx((0.5 + 0.375) / 4)
    assert found.describe_failures().endswith("): count as 0")


def test_a_run_whose_reward_others_give_later_has_none() -> None:
    left = RunResults([result(0, 0, None, state="awaiting_reward")])
    assert Evaluation(left, runs=1).failed == {"no_reward": 1}


@pytest.mark.parametrize(
    ("runs", "ks"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (10, [1, 2, 4, 8, 10])]
)
def test_pass_at_k_has_default_ks_up_to_the_number_of_runs(runs: int, ks: list[int]) -> None:
    assert Evaluation(RunResults(), runs=runs).default_ks() == ks


def test_figures_and_table_show_rewards_and_pass_rates() -> None:
    found = Evaluation(RESULTS, runs=4)
    figures = found.figures([1, 4])
    assert figures["pass_at"]["4"]["mean"] == 0.5 and list(figures["pass_at"]) == ["1", "4"]
    assert figures["versions"] == [3] and figures["items"] == 4
    assert figures["by_item"][0] == {"item": 0, "task_id": "first", "rewards": [1, 0, 0, 1]}
    head, *rows = found.table([1, 4])
    assert [row.split() for row in rows] == [
        ["reward", "0.417", "0.000", "..", "1.000", "3"],
        ["pass@1", "0.333", "0.000", "..", "1.000", "3"],
        ["pass@4", "0.500", "0.000", "..", "1.000", "2"],
    ]
    assert {len(line) for line in (head, *rows)} == {len(head)}


def test_an_evaluation_without_a_good_run_has_no_figures_and_no_error() -> None:
    found = Evaluation(RunResults([failed(0, 0)]), runs=1)
    assert found.reward is None and found.pass_at(1) is None
    assert found.figures([1])["reward"] is None
    assert found.table([1])[1].split() == ["reward", "-", "-", "0"]
    assert found.describe_versions() == "version unknown, as no run has ended well"
