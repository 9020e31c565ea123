"""The schedule: who gets a place, in which order, and who gives one up."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from router.cloud.schedule import ASKED_FOR, Plan, Rules, State, plan

RULES = Rules(places=2, idle_after=600.0, quiet_after=30.0, turn=900.0)
NOW = 10_000.0


@dataclass
class Seat:
    name: str
    state: State = "idle"
    wanted_at: float | None = None
    asked_at: float = NOW
    started_at: float = NOW
    calls: int = 0
    ends: bool = False
    retry_at: float = 0.0
    waiting: int = 0
    account: str = "a"


def planned(*seats: Seat, **rules: Any) -> tuple[list[str], list[str], list[str], Plan[Seat]]:
    out = plan(seats, NOW, Rules(**{**_plain(RULES), **rules}))
    names = [[seat.name for seat in part] for part in (out.start, out.stop, out.queue)]
    return names[0], names[1], names[2], out


def _plain(rules: Rules) -> dict[str, Any]:
    return {name: getattr(rules, name) for name in ("places", "idle_after", "quiet_after", "turn")}


def waiting(name: str, since: float, **more: Any) -> Seat:
    return Seat(name, wanted_at=NOW - since, **more)


def running(name: str, *, quiet: float = 0.0, since: float = 100.0, **more: Any) -> Seat:
    return Seat(name, "running", asked_at=NOW - quiet, started_at=NOW - since, **more)


def test_places_go_to_those_that_asked_first() -> None:
    start, stop, queue, _ = planned(waiting("late", 1), waiting("first", 9), waiting("next", 5))
    assert (start, stop, queue) == (["first", "next"], [], ["late"])


def test_an_account_with_many_runs_does_not_take_all_places() -> None:
    many = [waiting(f"m{k}", 9 - k, account="many") for k in range(3)]
    one = waiting("one", 1, account="one")
    assert planned(*many, one)[:3] == (["m0", "one"], [], ["m1", "m2"])
    held = running("held", account="many")
    assert planned(held, *many, one)[0] == ["one"]


def test_a_run_that_starts_or_stops_takes_its_place() -> None:
    seats = (Seat("a", "starting"), Seat("b", "stopping"), waiting("c", 3))
    assert planned(*seats)[:3] == ([], [], ["c"])


def test_a_quiet_run_makes_room_and_a_busy_one_stays_until_its_turn_is_over() -> None:
    quiet, busy = running("quiet", quiet=31), running("busy", quiet=31, calls=1)
    assert planned(quiet, busy, waiting("c", 3))[1] == ["quiet"]
    assert planned(running("a"), busy, waiting("c", 3))[1] == []
    over = running("over", since=901, calls=3)
    assert planned(over, running("young"), waiting("c", 3))[1] == ["over"]


def test_no_more_runs_stop_than_others_wait() -> None:
    seats = [running(f"r{k}", quiet=40 + k, since=2000) for k in range(3)]
    assert planned(*seats, waiting("c", 3), places=3)[1] == ["r2"]
    # One that stops already is enough.
    seats[0].state = "stopping"
    assert planned(*seats, waiting("c", 3), places=3)[1] == []


def test_without_others_a_run_stays_until_it_is_idle() -> None:
    assert planned(running("a", quiet=599, since=5000))[1] == []
    assert planned(running("a", quiet=601, since=5000))[1] == ["a"]
    assert planned(running("a", quiet=601, since=5000, calls=1))[1] == []


def test_a_run_that_its_owner_stopped_leaves_at_once_and_never_waits() -> None:
    start, stop, queue, _ = planned(running("a", calls=1, ends=True), waiting("b", 3, ends=True))
    assert (start, stop, queue) == ([], ["a"], [])


def test_a_failed_run_lets_others_pass_until_its_pause_is_over() -> None:
    failed = waiting("failed", 9, state="failed", retry_at=NOW + 5)
    start, _, queue, out = planned(failed, waiting("b", 3), places=1)
    assert (start, queue, out.again_at) == (["b"], [], NOW + 5)
    failed.retry_at = NOW - 1
    assert planned(failed, waiting("b", 3), places=1)[0] == ["failed"]


def test_nobody_keeps_a_place_in_the_queue_without_asking_again() -> None:
    gone = waiting("gone", 500, asked_at=NOW - ASKED_FOR - 1)
    assert planned(gone, waiting("b", 3), places=1)[0] == ["b"]
    gone.waiting = 1
    assert planned(gone, waiting("b", 3), places=1)[0] == ["gone"]


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_crowd_takes_turns_and_nobody_starves(seed: int) -> None:
    rng = random.Random(seed)
    rules = Rules(places=2, idle_after=60.0, quiet_after=5.0, turn=20.0)
    seats = [Seat(str(k), wanted_at=NOW, asked_at=NOW) for k in range(7)]
    served = {seat.name: 0.0 for seat in seats}
    now = NOW
    while now < NOW + 900:
        for seat in seats:
            # Everybody asks all the time.
            seat.asked_at, seat.calls = now, 1
            if seat.state == "idle" and seat.wanted_at is None:
                seat.wanted_at = now
            elif seat.state == "starting" and rng.random() < 0.5:
                seat.state, seat.started_at, seat.wanted_at = "running", now, None
            elif seat.state == "stopping" and rng.random() < 0.5:
                seat.state = "idle"
            served[seat.name] += seat.state == "running"
        out = plan(seats, now, rules)
        for seat in out.start:
            seat.state = "starting"
        for seat in out.stop:
            seat.state = "stopping"
        held = sum(seat.state != "idle" for seat in seats)
        assert held <= 2
        now += 1.0
    assert min(served.values()) > 0.5 * max(served.values())
