from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from any_agent.errors import AnyAgentError, Conflict, InvalidRequest, NotFound, SessionMismatch
from any_agent.keys import KeySigner
from any_agent.rundir.fleet import Fleet
from router.affinity import SessionAffinity, home_of, homes_of
from tests.support.errors import fails_with

RANKS = 3
SIGNER = KeySigner(b"s" * 32)
AFFINITY = SessionAffinity(SIGNER, lambda: Fleet.of(RANKS))
KEYS = [SIGNER.mint(rank)[1] for rank in range(RANKS)]
IDS = [f"ses-{rank}-0123456789abcdef" for rank in range(RANKS)]
BAD_KEYS = {
    "forged": KEYS[1][:-1] + ("0" if KEYS[1][-1] != "0" else "1"),
    "of another rank": KEYS[1].replace("sk-v1.1.", "sk-v1.2."),
    "truncated": KEYS[1][:-5],
    "of another service": KeySigner(b"t" * 32).mint(1)[1],
    "no more than a prefix": "sk-v1.",
}


def place(path: str = "/v1/x", query: str = "", **headers: str) -> tuple[int | None, bool]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return AFFINITY.locate(path, query, CIMultiDictProxy(CIMultiDict(named)))[:2]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_session_or_key_is_found_at_every_place_of_a_request(rank: int) -> None:
    key, session_id = KEYS[rank], IDS[rank]
    assert place(**bearer(key)) == (rank, True)
    assert place(X_Api_Key=key) == (rank, True)
    for name in (key, session_id):
        assert place(f"/{name}/v1/chat/completions") == (rank, True)
        assert place(X_Any_Agent_Session=name) == (rank, True)
        assert place(query=f"a=1&session_id={name}") == (rank, True)
        assert place(f"/rl/v1/sessions/{name}/abort") == (rank, True)


@pytest.mark.parametrize(
    "path", ["/v1/x", "/", "/rl/v1/sessions", "/sk-v1.0", "/ses", "/v1/sk-v1.0.x/y", ""]
)
def test_a_request_without_a_session_has_no_place(path: str) -> None:
    assert place(path) == (None, False)
    assert place(path, **bearer("operator-secret")) == (None, False)


def test_a_prefix_beats_bearers() -> None:
    """Agents send "DUMMY", another service's key, or one of another session."""
    for other in ("DUMMY", KEYS[2], BAD_KEYS["forged"]):
        assert place(f"/{KEYS[1]}/v1/x", **bearer(other), X_Api_Key="another") == (1, True)


def test_a_prefix_may_look_like_a_route() -> None:
    """Whatever begins like a key or an id is one: no route does."""
    for path in ("/ses-0-nonsense/v1/x", "/ses-/healthz"):
        assert place(path) == (None, True)
    assert place("/sk-v1.healthz/v1/x") == (None, True)


@pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS)
def test_bad_keys_choose_no_rank(key: str) -> None:
    """Whichever is asked says what is wrong with them, as it does for every other key."""
    for name in ("ses-01-0123456789abcdef", "something", "ses-1-short"):
        assert place(X_Any_Agent_Session=name) == (None, True)
    for placed in (
        place(**bearer(key)),
        place(X_Api_Key=key),
        place(X_Any_Agent_Session=key),
        place(f"/{key}/v1/x"),
        place(query=f"session_id={key}"),
    ):
        assert placed == (None, True)


def test_a_name_of_a_rank_that_the_service_does_not_have_is_refused() -> None:
    for where in (
        bearer(SIGNER.mint(RANKS)[1]),
        {"X_Any_Agent_Session": f"ses-{RANKS}-0123456789abcdef"},
        {"query": "session_id=ses-9999-0123456789abcdef"},
    ):
        with fails_with(NotFound, code="unknown_rank"):
            place(**where)


def test_a_query_of_thousands_of_fields_is_not_looked_through() -> None:
    """To take each apart costs tens of milliseconds, before anybody has shown a key."""
    fields = "&".join(["a=%41"] * 10_000)
    assert place(query=fields) == (None, False)
    with fails_with(InvalidRequest, "fields"):
        place(query=f"{fields}&session_id={IDS[1]}")
    few = "&".join(["a=%41"] * 50)
    assert place(query=f"{few}&session_id={IDS[1]}") == (1, True)


def test_a_request_that_names_two_sessions_is_refused() -> None:
    for where in (
        {**bearer(KEYS[0]), "X_Any_Agent_Session": IDS[1]},
        {"X_Any_Agent_Session": IDS[1], "query": f"session_id={IDS[2]}"},
        {"path": f"/{KEYS[0]}/v1/x", "query": f"session_id={IDS[1]}"},
        {"path": f"/rl/v1/sessions/{IDS[0]}", **bearer(KEYS[1])},
        {**bearer(KEYS[0]), "X_Api_Key": KEYS[1]},
    ):
        with pytest.raises(SessionMismatch):
            place(**where)
    assert place(**bearer(KEYS[1]), X_Any_Agent_Session=IDS[1]) == (1, True)
    assert place(**bearer(KEYS[0]), X_Api_Key=KEYS[0]) == (0, True)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60), st.text(max_size=60))
def test_no_request_makes_the_search_for_a_rank_raise_the_unexpected(path: str, value: str) -> None:
    for where in (
        {"path": f"/{path}"},
        {"path": f"/sk-v1.{path}/{value}"},
        {"path": f"/ses-{path}/{value}"},
        {"X_Any_Agent_Session": value},
        bearer(f"sk-v1.{value}"),
        {"query": f"session_id={value}&{path}"},
    ):
        try:
            rank, _ = place(**where)
        except AnyAgentError as error:
            assert error.status in (400, 401, 404)
        else:
            assert rank is None or rank < RANKS


def test_groups_and_tasks_have_one_home_each() -> None:
    homes = AFFINITY.homes
    group = homes(api_key=None, group_id="g", task_id=None)
    assert group == [home_of("g", range(RANKS))]
    assert homes(api_key=None, group_id="g", task_id="t") == group
    assert homes(api_key=None, group_id=None, task_id="t") == [home_of("t", range(RANKS))]
    assert homes(api_key=None, group_id=None, task_id=None) is None
    assert homes(api_key=KEYS[2], group_id=None, task_id=None) == [2]
    for none in (BAD_KEYS["forged"], "something else"):
        assert homes(api_key=none, group_id=None, task_id=None) is None
    # An earlier key must be of its group's rank.
    assert homes(api_key=KEYS[group[0]], group_id="g", task_id=None) == group
    with fails_with(Conflict, code="lane_on_other_rank"):
        homes(api_key=KEYS[group[0] - 1], group_id="g", task_id=None)


NAMES = st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=64)


CHANGES = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["serving", "draining", "ended"])), max_size=12
)


@given(st.lists(NAMES, min_size=1, max_size=8, unique=True), CHANGES)
def test_a_change_of_the_fleet_moves_no_living_group(
    names: list[str], changes: list[tuple[int, str]]
) -> None:
    """Whenever a member comes, the first of its homes that has the group is the one that had it."""
    fleet = Fleet.of(3)
    groups: dict[str, int] = {}

    def join(name: str) -> int:
        homes = homes_of(name, fleet)
        return next((rank for rank in homes if groups.get(name) == rank), homes[-1])

    for k, (rank, state) in enumerate([(0, "serving"), *changes]):
        changed = fleet.with_state(rank, None if state == "ended" else state)  # type: ignore[arg-type]
        fleet = changed if changed.serving else fleet
        # A rank ends when its groups have ended.
        groups = {name: home for name, home in groups.items() if fleet.state(home) is not None}
        for name in names[: k + 1]:
            found = join(name)
            assert groups.setdefault(name, found) == found
            assert fleet.state(found) is not None
            if found not in fleet.serving:
                assert homes_of(name, fleet)[-1] != found, "a group would begin there"


@given(NAMES, st.integers(1, 32))
def test_most_names_have_one_home(name: str, ranks: int) -> None:
    fleet = Fleet.of(ranks)
    assert homes_of(name, fleet) == [home_of(name, range(ranks))]
    grown = fleet.with_state(ranks, "serving")
    now = home_of(name, range(ranks + 1))
    assert homes_of(name, grown) == (
        homes_of(name, fleet) if now != ranks else [*homes_of(name, fleet), ranks]
    )


def test_a_session_of_a_rank_that_has_ended_is_refused() -> None:
    fleet = Fleet.of(3).with_state(1, None)
    affinity = SessionAffinity(SIGNER, lambda: fleet)
    assert [affinity.rank_of(KEYS[rank]) for rank in (0, 2)] == [0, 2]
    with fails_with(NotFound, "rank 1", code="unknown_rank"):
        affinity.rank_of(KEYS[1])


def test_homes_do_not_depend_on_the_process() -> None:
    """Python's own hash does; these are what every router has answered so far."""
    assert [home_of(f"group-{k}", range(4)) for k in range(8)] == [2, 0, 3, 2, 0, 1, 0, 0]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("form", ["group-{}", "{}", "gsm8k/train/{}/x", "a" * 50 + "{}"])
def test_homes_are_spread_evenly(ranks: int, form: str) -> None:
    count = 2000 * ranks
    found = Counter(home_of(form.format(k), range(ranks)) for k in range(count))
    # Five standard deviations of a fair choice.
    allowed = 5 * (count * (1 / ranks) * (1 - 1 / ranks)) ** 0.5
    assert all(abs(found[rank] - count / ranks) < allowed for rank in range(ranks)), found
