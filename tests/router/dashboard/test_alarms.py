"""Alarms: each fault has its words and what to do, and a run that is well has none."""

from __future__ import annotations

from typing import Any

import pytest

from router.dashboard.alarms import Alarm, Part, alarms_of
from router.dashboard.scrape import Samples
from router.dashboard.training import Steps

WELL = [Part("router", "ready"), Part("rank-0", "ready"), Part("trainer", "ready")]
SINCE = {"reward": None, "sessions": 0, "dull": 0}
STEP = {"step": 7, "sessions": 8, "mismatch": 0.5, "mismatch_fresh": 0.001}


def alarms(**changed: Any) -> list[Alarm]:
    given: dict[str, Any] = {
        "parts": WELL,
        "samples": {},
        "slots": {"waiting": 0},
        "steps": Steps([STEP]),
        "waiting": "",
        "since_step": SINCE,
        "clocks": {},
    }
    return alarms_of(**given | changed)


def test_a_run_that_is_well_has_no_alarm() -> None:
    assert alarms() == [] == alarms(steps=Steps())
    # Opens wait for slots all the time; it is the trainer's pace.
    assert alarms(slots={"waiting": 9}) == []
    assert alarms(parts=[Part("trainer", "starting")], slots={"waiting": 9}) == []
    assert alarms(samples={"rank-0": disk(0, "run", "+Inf", 0)}) == []
    archived = Samples('any_agent_archive_removed_sessions_total{limit="set"} 9')
    assert alarms(samples={"rank-0": archived}) == []


def test_what_concerns_training_is_no_alarm_where_nothing_is_trained() -> None:
    dull = Steps([STEP, STEP | {"left_out": {"zero_variance": 24}}])
    for parts in ([], [Part("trainer", "done")]):
        assert alarms(parts=parts, steps=dull, waiting="waiting   for x") == []
    assert alarms(parts=[Part("trainer", "starting")], waiting="waiting   for x") == []


def steps(**more: Any) -> dict[str, Any]:
    return {"steps": Steps([STEP, STEP | more])}


def shows(text: str) -> dict[str, Any]:
    return {"samples": {"rank-0": Samples(text)}}


@pytest.mark.parametrize(
    ("changed", "level", "what", "do"),
    [
        ({"clocks": {0: 5.0, 3: 3600.0}}, "warn", "rank 3 is 60 minutes ahead of", "NTP"),
        ({"clocks": {3: -3600.0}}, "warn", "rank 3 is 60 minutes behind", "NTP"),
        ({"parts": [Part("rank-1", "away")]}, "bad", "Rank 1 does not answer", "rank-1.log"),
        ({"parts": [Part("rank-0", "no engine")]}, "bad", "no engine", "engine-*.log"),
        ({"parts": [Part("rank-0", "disk full")]}, "bad", "no room", "Free some space"),
        ({"parts": [Part("rank-0", "stalled")]}, "bad", "no heartbeat", "load"),
        ({"parts": [Part("trainer", "away")]}, "bad", "The trainer does not", "trainer.log"),
        ({"waiting": "waiting   for x\nwaiting   y"}, "warn", "waiting: for x. y.", "agents"),
        (steps(mismatch_fresh=0.5), "warn", "disagree about the same weights", "doctor"),
        ({"steps": Steps([{"step": 7, "mismatch": 0.5}])}, "warn", "may disagree", "train.lr"),
        (steps(left_out={"zero_variance": 24}), "warn", "24 of the last 32", "too easy"),
        (shows("any_agent_journal_log_away 1.0"), "bad", "Redis", "server.journal"),
        (shows('any_agent_journal_damaged_total{rank="0"} 2.0'), "warn", "2 sessions", "disk"),
        (
            shows('any_agent_archive_removed_sessions_total{limit="default"} 9'),
            "warn",
            "9 archived sessions",
            "sessions.archive_bytes",
        ),
    ],
)
def test_each_fault_is_told_with_what_to_do(
    changed: dict[str, Any], level: str, what: str, do: str
) -> None:
    (alarm,) = alarms(**changed)
    assert alarm.level == level and what in alarm.what and do in alarm.do


def test_groups_that_teach_nothing_are_an_alarm_before_the_next_step() -> None:
    """A step may be long in coming then, and the last one's figures hide why."""
    (alarm,) = alarms(since_step={"reward": 0.996, "sessions": 8720, "dull": 8008})
    assert alarm.level == "warn"
    assert "8008 of the last 8720" in alarm.what
    (first,) = alarms(since_step={"reward": 1.0, "sessions": 20, "dull": 20}, steps=Steps())
    assert "20 of the last 20" in first.what
    # A few sessions say nothing, and the next ones may have differed.
    assert alarms(since_step={"reward": 1.0, "sessions": 8, "dull": 8}) == []
    taught = Steps([STEP, STEP | {"left_out": {"zero_variance": 24}}])
    assert alarms(since_step={"reward": 0.5, "sessions": 40, "dull": 8}, steps=taught) == []
    # A step's first sessions alone do not end it.
    (alarm,) = alarms(since_step={"reward": 0.5, "sessions": 20, "dull": 9}, steps=taught)
    assert "33 of the last 52" in alarm.what


def test_drift_of_older_tokens_is_no_alarm_where_fresh_ones_agreed_lately() -> None:
    drifted = {"step": 8, "sessions": 8, "mismatch": 0.5}
    assert alarms(steps=Steps([STEP, drifted])) == []
    (alarm,) = alarms(steps=Steps([STEP, *[drifted] * 99]))
    assert "may disagree" in alarm.what
    wrong = STEP | {"mismatch_fresh": 0.5}
    (alarm,) = alarms(steps=Steps([wrong, drifted]))
    assert "step 7" in alarm.what and "may" not in alarm.what


def test_the_first_seconds_without_agents_are_no_alarm() -> None:
    early = "trainer   waits for trajectories: 0 of 64 sessions came"
    assert alarms(waiting=early) == []
    (alarm,) = alarms(waiting=f"{early}\nwaiting   20 groups scored alike")
    assert "20 groups scored alike" in alarm.what and "0 of 64" not in alarm.what


def test_the_worst_alarm_comes_first() -> None:
    found = alarms(waiting="waiting for x", parts=[Part("trainer", "away")], slots={"waiting": 2})
    assert [alarm.level for alarm in found] == ["bad", "bad", "warn"]
    assert "2 opens wait" in found[1].what


def disk(rank: int, disk: str, seconds: str, free: float) -> Samples:
    labels = f'{{disk="{disk}",rank="{rank}"}}'
    full = f"any_agent_disk_full_in_seconds{labels} {seconds}"
    return Samples(f"{full}\nany_agent_disk_free_bytes{labels} {free}")


def test_a_disk_that_is_full_within_an_hour_is_told_once_for_all_who_share_it() -> None:
    (found,) = alarms(
        samples={
            "rank-0": disk(0, "run", "3000.0", 3.2e9),
            "rank-1": disk(1, "run", "1800.0", 3.1e9),
            "rank-2": disk(2, "run", "3601.0", 3.1e9),
        }
    )
    assert found.level == "bad"
    for text in ("The disk of the run", "30 minutes", "3,100 MB"):
        assert text in found.what
    assert "sessions.archive_bytes" in found.do


def test_a_disk_of_journals_names_the_ranks_whose_it_is() -> None:
    (found,) = alarms(
        samples={
            "rank-0": disk(0, "journal", "20.0", 1e6),
            "rank-1": disk(1, "journal", "+Inf", 9e9),
        }
    )
    assert "journal of rank-0 will be full in 1 minutes" in found.what
