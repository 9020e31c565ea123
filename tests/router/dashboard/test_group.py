"""A group's sessions side by side: in order, and with what cannot be read named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from any_agent.errors import NotFound, ServiceUnavailable
from router.dashboard.group import MOST, read_group
from router.dashboard.ranks import RankReader, SessionsPage, Visitor
from router.dashboard.trajectory import message_of, turns_of
from tests.support.errors import fails_with

ME = Visitor("", "me", None, "127.0.0.1")


class Ranks:
    """Sessions by id: the reward, and the number of calls that are counted;
    None: the rank is away."""

    def __init__(
        self, missing: list[int], *, pages: int = 1, **sessions: tuple[float | None, int | None]
    ) -> None:
        self.sessions_by_id = sessions
        self.missing = missing
        self.pages = pages
        """Pages that are empty but for the last one."""
        self.archived: set[str] = set()
        self.scores: dict[str, float] = {}
        self.hidden = 0
        """Calls of each session that are counted and not shown."""
        self.asked: list[tuple[str, int]] = []
        self.queries: list[Mapping[str, str]] = []

    async def sessions(self, visitor: Visitor, query: Mapping[str, str]) -> SessionsPage:
        assert visitor is ME and query["group_id"] == "g/1" and query["limit"] == str(MOST)
        self.queries.append(query)
        if len(self.queries) < self.pages:
            return SessionsPage([], f"after {len(self.queries)}", self.missing)
        infos = [
            {
                "session_id": id,
                "reward": reward,
                "interactions": 1 if calls is None else calls,
                "content": "archived" if id in self.archived else "stored",
            }
            for id, (reward, calls) in self.sessions_by_id.items()
        ]
        return SessionsPage(infos, "", self.missing)

    async def of_session(
        self, visitor: Visitor, id: str, rest: str, *, start: int, limit: int
    ) -> dict[str, Any]:
        assert rest == "/interactions" and limit == 1
        calls = self.sessions_by_id[id][1]
        if calls is None:
            raise ServiceUnavailable("rank 0 does not answer")
        self.asked.append((id, start))
        total = max(0, calls - self.hidden)
        found = [call(start + 1, start or None)] if start < total else []
        return {"interactions": found, "total": total, "score": self.scores.get(id)}


def read(ranks: Ranks, tenant: str = "") -> Any:
    return read_group(cast(RankReader, ranks), ME, "g/1", tenant)


async def test_the_best_is_first_and_each_shows_its_last_call() -> None:
    ranks = Ranks([], a=(0.0, 2), b=(None, 0), c=(1.0, 3), d=(0.5, None))
    group = await read(ranks)
    assert [member.info["session_id"] for member in group.members] == ["c", "d", "a", "b"]
    assert [member.last and member.last.call["number"] for member in group.members] == [
        *(3, None, 2, None)
    ]
    assert [member.problem for member in group.members] == ["", "rank 0 does not answer", "", ""]
    assert group.mean == 0.5 and not group.alike
    # No last call is a first one: one is read for the prompt.
    assert ranks.asked == [("a", 1), ("b", 0), ("c", 2), ("a", 0)]
    assert group.prompt[0].pieces[0].text == "m1"


@pytest.mark.parametrize(
    ("rewards", "alike"), [((1.0, 1.0), True), ((0.0, 1.0), False), ((1.0,), False), ((), False)]
)
async def test_a_group_without_a_difference_is_named(
    rewards: tuple[float, ...], alike: bool
) -> None:
    ranks = Ranks([], **{f"s{k}": (reward, 1) for k, reward in enumerate(rewards)}, z=(None, 1))
    group = await read(ranks)
    assert group.alike is alike
    assert not (await read(Ranks([1], a=(1.0, 1), b=(1.0, 1)))).alike, "not wholly known"
    assert len(ranks.asked) == len(rewards) + 1, "a first call was read twice"
    ranks.archived = {"z"}
    group = await read(ranks)
    assert (group.unknown, group.alike) == (1, False), "z may have had another reward"


async def test_a_group_of_one_reward_whose_scores_differ_is_not_alike() -> None:
    # As with train.discount, under which an early call of a long session counts less.
    ranks = Ranks([], a=(1.0, 1), b=(1.0, 2))
    ranks.scores = {"b": 1.0, "a": 0.95}
    group = await read(ranks)
    assert [member.info["session_id"] for member in group.members] == ["b", "a"]
    assert not group.alike
    ranks.scores = {"a": 0.95, "b": 0.95 + 1e-12}
    assert (await read(ranks)).alike


async def test_an_unknown_group_is_refused_unless_a_rank_is_away() -> None:
    with fails_with(NotFound, "g/1"):
        await read(Ranks([]))
    group = await read(Ranks([1]))
    assert (group.missing, group.members, group.mean) == ([1], [], None)


async def test_a_group_is_looked_for_behind_empty_pages() -> None:
    ranks = Ranks([], pages=3, a=(1.0, 1))
    group = await read(ranks, "acme")
    assert [member.info["session_id"] for member in group.members] == ["a"] and not group.more
    assert [query.get("after") for query in ranks.queries] == [None, "after 1", "after 2"]
    assert {query["tenant"] for query in ranks.queries} == {"acme"}
    with pytest.raises(NotFound):
        await read(Ranks([], pages=99, a=(1.0, 1)))


async def test_calls_of_frozen_models_are_counted_and_not_shown() -> None:
    ranks = Ranks([], a=(1.0, 5), b=(1.0, 2))
    ranks.hidden = 2
    group = await read(ranks)
    assert [member.last and member.last.call["number"] for member in group.members] == [3, None]


def call(number: int, parent: int | None, continuation: str = "exact") -> dict[str, Any]:
    return {
        "id": f"c{number}",
        "parent_id": None if parent is None else f"c{parent}",
        "number": number,
        "continuation": continuation,
        "message_delta": [{"role": "user", "content": f"m{number}"}],
        "output_message": {"role": "assistant", "content": "a"},
    }


def test_each_call_is_shown_at_its_place_in_the_tree() -> None:
    calls = [
        call(1, None, "root"),
        call(2, 1),
        call(3, 1),
        call(4, 2, "branch"),
        call(5, None, "root"),
        call(6, 5),
    ]
    turns = turns_of(calls, [{"interaction_id": "c3", "name": "style", "value": 1.0}])
    assert [turn.place for turn in turns] == [
        *("first", "next", "continues", "branch", "branch", "next")
    ]
    assert [turn.parent for turn in turns] == [None, 1, 1, 2, None, 5]
    assert [len(turn.rewards) for turn in turns] == [0, 0, 1, 0, 0, 0]
    # A page begins below a call that it does not show.
    (turn,) = turns_of([call(26, 25)], [])
    assert (turn.place, turn.parent) == ("continues", None)


@pytest.mark.parametrize(
    ("message", "pieces"),
    [
        ({"role": "user", "content": "hi"}, [("text", "hi")]),
        ({"role": "user", "content": None}, []),
        ({"role": "assistant"}, []),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b", {"type": "image"}, 3]},
            [("text", "a"), ("text", "b"), ("other", '{\n  "type": "image"\n}'), ("other", "3")],
        ),
        (
            {"role": "assistant", "reasoning_content": "hm", "content": "so"},
            [("reasoning", "hm"), ("text", "so")],
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            [("tool", "{}")],
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}, 7]},
            [("tool", "{}"), ("other", "7")],
        ),
        ({"role": "assistant", "tool_calls": {"a": 1}}, []),
    ],
)
def test_each_kind_of_message_is_split_into_its_pieces(
    message: dict[str, Any], pieces: list[tuple[str, str]]
) -> None:
    assert [(piece.kind, piece.text) for piece in message_of(message).pieces] == pieces
