"""The fleet: what a change makes of it, and what a reader of its file sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_agent.errors import StartupError
from any_agent.rundir.fleet import Fleet, FleetFile, RankState, load_fleet, save_fleet
from tests.support.errors import fails_with

CHANGES = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["joining", "serving", "draining", "drained"])),
    max_size=30,
)


def test_ranks_can_be_added_to_and_drained_from_a_fleet() -> None:
    fleet = Fleet.of(2).with_state(2, "joining")
    assert (fleet.number, fleet.serving, fleet.ranks) == (1, (0, 1), (0, 1, 2))
    assert [fleet.state(rank) for rank in range(4)] == ["serving", "serving", "joining", None]
    fleet = fleet.with_state(2, "serving")
    assert (fleet.number, fleet.serving) == (2, (0, 1, 2))
    fleet = fleet.with_state(0, "draining")
    assert (fleet.number, fleet.serving, fleet.ranks) == (3, (1, 2), (0, 1, 2))
    fleet = fleet.with_state(0, "drained").with_state(0, None)
    assert (fleet.number, fleet.ranks, fleet.state(0), fleet.knew(0)) == (3, (1, 2), None, True)
    assert not fleet.knew(3)
    assert fleet.served == ((0, 1), (0, 1, 2), (1, 2))


def test_a_set_of_ranks_that_serves_again_is_kept_once() -> None:
    """A fleet that grows and shrinks for ever must not grow a history for ever."""
    fleet = Fleet.of(1)
    for _ in range(100):
        fleet = fleet.with_state(1, "serving").with_state(1, None)
    assert fleet.served == ((0, 1), (0,))
    assert fleet.number == 201


@pytest.mark.parametrize(
    ("before", "count", "serving", "others"),
    [
        (Fleet.of(2), 2, (0, 1), {}),
        (Fleet.of(2), 3, (0, 1, 2), {}),
        (Fleet.of(4), 2, (0, 1), {2: "draining", 3: "draining"}),
        # Started again with what it had become.
        (Fleet.of(2).with_state(0, None), 1, (1,), {}),
        (Fleet.of(2).with_state(0, None), 2, (0, 1), {}),
        # What was to end is needed again, and goes on with its sessions.
        (Fleet.of(3).with_state(1, "draining"), 3, (0, 1, 2), {}),
        (Fleet.of(3).with_state(1, "draining"), 2, (0, 2), {1: "draining"}),
        (Fleet.of(3).with_state(1, "drained"), 1, (0,), {1: "drained", 2: "draining"}),
        # It never served, so it is forgotten.
        (Fleet.of(2).with_state(2, "joining"), 2, (0, 1), {}),
    ],
)
def test_a_start_with_another_number_of_ranks_drains_or_adds_some(
    before: Fleet, count: int, serving: tuple[int, ...], others: dict[int, RankState]
) -> None:
    fleet = before.resized(count)
    assert (fleet.serving, fleet.others) == (serving, others)
    assert fleet.resized(count) == fleet
    assert set(before.served) <= set(fleet.served)


@given(CHANGES, st.integers(1, 6))
def test_a_start_has_its_ranks_after_any_sequence_of_changes(
    changes: list[tuple[int, RankState]], count: int
) -> None:
    fleet = Fleet.of(3)
    for rank, state in changes:
        changed = fleet.with_state(rank, state)
        fleet = changed if changed.serving else fleet
    started = fleet.resized(count)
    assert len(started.serving) == count
    assert len(started.served) == len(set(started.served))
    kept = {rank for rank in fleet.ranks if fleet.state(rank) != "joining"}
    assert kept <= set(started.ranks), "a rank with sessions is forgotten"


def test_a_reader_follows_the_fleets_file(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    file = FleetFile(path, 2)
    assert file.refresh() == Fleet.of(2), "before the first start"
    grown = Fleet.of(2).with_state(2, "joining").with_state(2, "serving")
    save_fleet(path, grown)
    assert file.refresh() == grown == load_fleet(path)
    path.write_text('{"number": 3')
    assert file.refresh() == grown, "the last good one"
    path.unlink()
    assert file.refresh() == grown


def test_a_damaged_file_is_no_fleet(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    assert load_fleet(path) is None
    path.write_text("[]")
    with fails_with(StartupError, f"{path} is damaged"):
        load_fleet(path)
