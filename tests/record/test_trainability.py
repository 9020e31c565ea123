"""Sessions whose calls do not continue each other are told from those that have sub-agents."""

from __future__ import annotations

from collections.abc import Mapping

from any_agent.record.trainability import CallCounts, TrainabilityWatch


def session(continued: int, reasons: Mapping[str, int]) -> CallCounts:
    roots = 1 + sum(reasons.values())
    return CallCounts(continued + roots, {}, continued, roots, reasons)


def test_sessions_that_rewrite_history_give_one_notice_while_it_lasts() -> None:
    watch = TrainabilityWatch()
    for _ in range(3):
        watch.add(session(0, {"history_rewritten": 2, "new_conversation": 1}))
        assert watch.take_notices() == []
    watch.add(session(5, {}))
    (notice,) = watch.take_notices()
    assert notice.startswith("3 of the last 4 sessions") and "6 history_rewritten" in notice
    assert "new_conversation" not in notice
    assert (watch.notices, watch.take_notices()) == ([notice], [])
    for _ in range(2):
        watch.add(session(5, {}))
    assert (watch.notices, watch.take_notices()) == ([], [])


def test_sub_agents_and_a_rare_compaction_give_no_notice() -> None:
    watch = TrainabilityWatch()
    for _ in range(8):
        watch.add(session(0, {"new_conversation": 9}))
        watch.add(session(9, {"history_rewritten": 2}))
    assert watch.notices == []
