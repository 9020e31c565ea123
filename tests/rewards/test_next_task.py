"""Which task to run next: what taught nothing is drawn less, as often as a dataset's items are."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from any_agent.data import DatasetCursor
from any_agent.protocol.rl import SessionLine
from any_agent.protocol.tasks import NextTask, TaskFacts
from any_agent.rewards.next_task import draw, facts_of, merged

TRAINED: dict[str, Any] = {"state": "trained"}
ALIKE: dict[str, Any] = {"state": "rejected", "reason": "zero_variance"}
UNTRAINABLE: dict[str, Any] = {"state": "rejected", "reason": "untrainable"}
OPEN: dict[str, Any] = {"state": "open"}
STALE: dict[str, Any] = {"state": "rejected", "reason": "stale"}


def line(at: float, group: str | None, reward: float | None, **more: Any) -> SessionLine:
    none = dict.fromkeys(("reason", "task_id", "tenant", "final_reward", "step", "ended_at"))
    return SessionLine.model_validate(
        {
            **none,
            "session_id": f"ses-0-{at}",
            "state": "finalized",
            "mode": "train",
            "group_id": group,
            "content": "stored",
            "interactions": 1,
            "created_at": at,
            "number": int(at),
            "rewards_given": 1,
            "reward": reward,
            **more,
        }
    )


def history(*groups: dict[str, Any]) -> list[SessionLine]:
    """A group of two sessions for each, the last one the newest; ranks list the newest first."""
    lines = [
        line(2 * k + n, f"g{k}", float(n), **more) for k, more in enumerate(groups) for n in (0, 1)
    ]
    return lines[::-1]


@pytest.mark.parametrize(
    ("groups", "verdict", "weight"),
    [
        ((), "unknown", 1),
        ((OPEN,), "unknown", 1),
        ((STALE,), "unknown", 1),
        ((TRAINED,), "teaches", 1),
        ((ALIKE,), "taught_nothing", 1 / 2),
        ((UNTRAINABLE, ALIKE), "taught_nothing", 1 / 4),
        ((ALIKE,) * 3, "taught_nothing", 1 / 8),
        ((ALIKE,) * 9, "taught_nothing", 1 / 8),
        ((TRAINED, ALIKE, OPEN, STALE), "taught_nothing", 1 / 2),
        ((ALIKE,) * 3 + (TRAINED,), "teaches", 1),
    ],
)
def test_a_task_weighs_less_by_its_last_groups_in_a_row_that_taught_nothing(
    groups: tuple[dict[str, Any], ...], verdict: str, weight: float
) -> None:
    facts = facts_of("t", history(*groups))
    assert (facts.verdict, facts.weight) == (verdict, weight)
    assert facts.sessions == 2 * len(groups)
    assert facts.mean_reward == (0.5 if groups else None)


@pytest.mark.parametrize("dull", range(6))
def test_the_weight_is_the_share_of_passes_in_which_a_datasets_item_comes(dull: int) -> None:
    cursor = DatasetCursor(1)
    for _ in range(dull):
        position, _ = next(cursor)
        cursor.judged(position, dull=True)
        cursor.consumed(position)
    before = position if dull else -1
    passes = next(cursor)[0] - before
    assert facts_of("t", history(*[ALIKE] * dull)).weight == 1 / passes


def test_where_steps_take_groups_that_scored_alike_their_rewards_judge() -> None:
    same = [line(n, "g", 1.0, **TRAINED) for n in (1, 0)]
    assert facts_of("t", same).verdict == "teaches"
    assert facts_of("t", same, keeps_alike=True).verdict == "taught_nothing"
    assert facts_of("t", history(TRAINED), keeps_alike=True).verdict == "teaches"
    alone = [line(1, None, 1.0, **TRAINED)]
    assert facts_of("t", alone, keeps_alike=True).verdict == "teaches"


def test_a_group_whose_score_is_not_its_reward_is_not_judged_by_it() -> None:
    same = [line(n, "g", 1.0, **TRAINED) for n in (1, 0)]
    unscored = {same[0].session_id}
    assert facts_of("t", same, keeps_alike=True, unscored=unscored).verdict == "unknown"
    assert facts_of("t", same, unscored=unscored).verdict == "teaches"


def test_groups_of_two_tenants_with_one_name_are_two() -> None:
    lines = [
        line(n, "g", 1.0, tenant=tenant, **what)
        for n, (tenant, what) in enumerate([("a", ALIKE), ("b", TRAINED), (None, ALIKE)])
    ]
    assert [one.taught for one in facts_of("t", lines).latest_groups] == [False, True, False]


def test_evaluations_tell_nothing() -> None:
    facts = facts_of("t", [line(1, None, 1.0, mode="eval", state="evaluated")])
    assert (facts.sessions, facts.rewards, facts.mean_reward) == (0, 0, None)


def test_the_parts_of_several_ranks_are_one_history() -> None:
    """The groups of a task may have homes of their own; the order of time counts."""
    groups = [TRAINED, ALIKE, ALIKE, TRAINED, ALIKE]
    lines = [*history(*groups), line(99, None, None, **OPEN)]
    parts = [[one for one in lines if one.number // 2 % 2 == rank] for rank in (0, 1)]
    (found,) = merged([facts_of("t", part)] for part in parts)
    assert found == facts_of("t", lines)
    assert (found.weight, found.sessions, found.rewards) == (1 / 2, 11, 10)
    assert merged([[facts_of("t", [])], [facts_of("t", [])]]) == [facts_of("t", [])]


def test_tasks_are_drawn_by_their_weights() -> None:
    candidates = [
        facts_of("new", []),
        facts_of("teaches", history(TRAINED)),
        facts_of("once", history(ALIKE)),
        facts_of("often", history(*[ALIKE] * 4)),
    ]
    random.seed(5)
    drawn = Counter(draw(candidates).task_id for _ in range(4000))
    for name, weight in {"new": 1.0, "teaches": 1.0, "once": 0.5, "often": 0.125}.items():
        share = weight / 2.625
        sigma = (4000 * share * (1 - share)) ** 0.5
        assert abs(drawn[name] - 4000 * share) < 5 * sigma, drawn


def test_the_answer_reads_back_with_all_candidates() -> None:
    candidates = [facts_of("a", history(ALIKE)), facts_of("b", [])]
    answer = draw(candidates)
    again = NextTask.model_validate_json(answer.model_dump_json())
    assert again == answer and again.candidates == candidates
    chosen = TaskFacts.model_validate(answer.model_dump(exclude={"candidates"}))
    assert chosen in candidates
