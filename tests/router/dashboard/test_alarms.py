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
DRIFTED = {"step": 8, "sessions": 8, "mismatch": 0.5}
EARLY = "trainer   waits for trajectories: 0 of 64 sessions came"


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


def steps(**more: Any) -> dict[str, Any]:
    return {"steps": Steps([STEP, STEP | more])}


def shows(text: str) -> dict[str, Any]:
    return {"samples": {"rank-0": Samples(text)}}


def since(reward: float, sessions: int, dull: int) -> dict[str, Any]:
    return {"since_step": {"reward": reward, "sessions": sessions, "dull": dull}}


def disk(rank: int, disk: str, seconds: str, free: float) -> Samples:
    labels = f'{{disk="{disk}",rank="{rank}"}}'
    full = f"any_agent_disk_full_in_seconds{labels} {seconds}"
    return Samples(f"{full}\nany_agent_disk_free_bytes{labels} {free}")


DULL = steps(left_out={"zero_variance": 24})


def test_a_run_that_is_well_has_no_alarm() -> None:
    quiet: list[dict[str, Any]] = [
        {},
        {"steps": Steps()},
        # Opens wait for slots all the time; it is the trainer's pace.
        {"slots": {"waiting": 9}},
        {"slots": {"waiting": 9}, "parts": [Part("trainer", "starting")]},
        {"samples": {"rank-0": disk(0, "run", "+Inf", 0)}},
        shows('any_agent_archive_removed_sessions_total{limit="set"} 9'),
        # What concerns training, where nothing is trained.
        {**DULL, "parts": [], "waiting": "waiting   for x"},
        {**DULL, "parts": [Part("trainer", "done")], "waiting": "waiting   for x"},
        {"parts": [Part("trainer", "starting")], "waiting": "waiting   for x"},
        # Older tokens drift; fresh ones agreed lately.
        {"steps": Steps([STEP, DRIFTED])},
        # A few sessions say nothing, and the next ones may have differed.
        since(1.0, sessions=8, dull=8),
        {**DULL, **since(0.5, sessions=40, dull=8)},
        # The first seconds without agents.
        {"waiting": EARLY},
    ]
    assert [changed for changed in quiet if alarms(**changed)] == []


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
        ({"waiting": f"{EARLY}\nwaiting   all alike"}, "warn", "waiting: all alike.", "agents"),
        (steps(mismatch_fresh=0.5), "warn", "disagree about the same weights", "doctor"),
        ({"steps": Steps([{"step": 7, "mismatch": 0.5}])}, "warn", "may disagree", "train.lr"),
        # Fresh tokens were last seen to agree, or to disagree, some steps ago.
        ({"steps": Steps([STEP, *[DRIFTED] * 99])}, "warn", "may disagree", "train.lr"),
        ({"steps": Steps([STEP | {"mismatch_fresh": 0.5}, DRIFTED])}, "warn", "step 7", "doctor"),
        (DULL, "warn", "24 of the last 32", "too easy"),
        # Before the next step, which may be long in coming then.
        (since(0.996, sessions=8720, dull=8008), "warn", "8008 of the last 8720", "too easy"),
        ({"steps": Steps(), **since(1.0, 20, 20)}, "warn", "20 of the last 20", "too easy"),
        # A step's first sessions alone do not end it.
        ({**DULL, **since(0.5, sessions=20, dull=9)}, "warn", "33 of the last 52", "too easy"),
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


def test_the_worst_alarm_comes_first() -> None:
    found = alarms(waiting="waiting for x", parts=[Part("trainer", "away")], slots={"waiting": 2})
    assert [alarm.level for alarm in found] == ["bad", "bad", "warn"]
    assert "2 opens wait" in found[1].what


def test_a_disk_that_is_full_within_an_hour_is_told_once_for_all_who_share_it() -> None:
    (found,) = alarms(
        samples={
            "rank-0": disk(0, "run", "3000.0", 3.2e9),
            "rank-1": disk(1, "run", "1800.0", 3.1e9),
            "rank-2": disk(2, "run", "3601.0", 3.1e9),
        }
    )
    assert found.level == "bad" and "sessions.archive_bytes" in found.do
    for text in ("The disk of the run", "30 minutes", "3,100 MB"):
        assert text in found.what
    own = {"rank-0": disk(0, "journal", "20.0", 1e6), "rank-1": disk(1, "journal", "+Inf", 9e9)}
    (found,) = alarms(samples=own)
    assert "journal of rank-0 will be full in 1 minutes" in found.what
