"""The tasks of the latest sessions."""

from __future__ import annotations

from typing import Any

from router.dashboard.tasks import ORDERS, tasks_of


def session(task: str | None, reward: float | None = None, **more: Any) -> dict[str, Any]:
    session.at += 1.0  # type: ignore[attr-defined]
    return {
        "mode": "train",
        "task_id": task,
        "group_id": None,
        "reward": reward,
        "reason": None,
        "state": "finalized",
        "created_at": session.at,  # type: ignore[attr-defined]
        **more,
    }


session.at = 0.0  # type: ignore[attr-defined]


def test_a_task_teaches_where_the_rewards_of_a_group_differ() -> None:
    sessions = [
        session("solved", 1.0, group_id="a"),
        session("solved", 1.0, group_id="a"),
        session("mixed", 0.0, group_id="b"),
        session("mixed", 1.0, group_id="b"),
        session("mixed", 1.0, group_id="c"),
        session("mixed", 1.0, group_id="c"),
        session("alone", None, reason="group_too_small", group_id="d"),
        session("single", 0.5),
        session(None, 0.5),
        session("solved", 0.0, mode="eval"),
    ]
    # Ranks answer with the newest first.
    tasks, known, without = tasks_of(reversed(sessions), "sessions")
    found = {task.id: task for task in tasks}
    assert (known, without) == (8, 1)
    assert {name: task.verdict for name, task in found.items()} == {
        "mixed": "teaches",
        "solved": "all alike",
        "alone": "never filled",
        "single": "",
    }
    mixed = found["mixed"]
    assert (mixed.sessions, mixed.mean, mixed.change) == (4, 0.75, 0.5)
    assert (mixed.groups, mixed.alike) == (2, 1)
    assert (found["solved"].change, found["alone"].mean) == (None, None)


def test_what_a_step_did_with_a_group_says_whether_it_scored_alike() -> None:
    sessions = [
        # Of different lengths: with train.discount their scores differ.
        session("trained", 1.0, group_id="a", state="trained"),
        session("trained", 1.0, group_id="a", state="trained"),
        session("left out", 1.0, group_id="b", state="rejected", reason="zero_variance"),
        session("left out", 0.5, group_id="b", state="rejected", reason="zero_variance"),
    ]
    for keeps in (False, True):
        tasks, _, _ = tasks_of(sessions, "latest", keeps_alike=keeps)
        assert {task.id: task.alike for task in tasks} == {"trained": keeps, "left out": 1}


def test_each_order_of_tasks_puts_the_right_one_first() -> None:
    sessions = [session("worse", reward) for reward in (1.0, 1.0, 0.0, 0.0)]
    sessions += [session("better", reward) for reward in (0.0, 0.0, 0.5, 0.5, 0.5)]
    sessions += [session("new", 0.2)]
    first = {order: tasks_of(sessions, order)[0][0].id for order in ORDERS}
    assert first == {
        "hardest": "new",
        "improved": "better",
        "worsened": "worse",
        "sessions": "better",
        "latest": "new",
    }
    assert tasks_of(sessions, "unknown")[0][0].id == "new"
    assert tasks_of([], "hardest") == ([], 0, 0)
