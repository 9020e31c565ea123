"""A trained session's advantage on its page is the one that the trainer took."""

from __future__ import annotations

from typing import Any, cast

import pytest

from any_agent.config import TrainConfig, load_config
from router.dashboard.advantage import MOST, advantage, advantages_of, read_advantage
from router.dashboard.group import GroupPage, Member
from router.dashboard.ranks import RankReader, SessionsPage, Visitor
from trainer.advantage import SessionRewards, estimate_advantages

ME = Visitor("", "me", None, "127.0.0.1")
RETURNS = [(1.0, 0.5), (0.25,), (0.0, 0.0, 0.75)]


def train(**settings: Any) -> TrainConfig:
    words = [f"train.{name}={value}" for name, value in settings.items()]
    return load_config(None, ["model.path=/model", *words], environ={}).train


def session(id: str, state: str = "trained", **more: Any) -> dict[str, Any]:
    return {"session_id": id, "state": state, "reason": None, "group_id": "g", "tenant": None,
            "content": "stored", **more}  # fmt: skip


class Ranks:
    """A group's sessions with their scores."""

    def __init__(self, *sessions: dict[str, Any], missing: tuple[int, ...] = ()) -> None:
        self.found = list(sessions)
        self.missing = list(missing)
        self.scores: dict[str, float | None] = {}

    async def sessions(self, visitor: Visitor, query: Any) -> SessionsPage:
        assert visitor is ME and query["group_id"] == "g" and int(query["limit"]) == MOST
        return SessionsPage(self.found, "", self.missing)

    async def of_session(self, visitor: Visitor, id: str, rest: str, **_: int) -> dict[str, Any]:
        assert visitor is ME and rest == "/interactions"
        return {"score": self.scores[id]}


async def read(ranks: Ranks, info: dict[str, Any], config: TrainConfig) -> Any:
    return await read_advantage(cast(RankReader, ranks), ME, info, config)


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "grpo"},
        {"preset": "grpo", "normalize_std": "none"},
        {"advantage_estimator": "rloo", "preset": "rloo"},
    ],
)
async def test_an_advantage_is_the_trainers(settings: dict[str, str]) -> None:
    config = train(**settings)
    group = [SessionRewards(returns, [True] * len(returns)) for returns in RETURNS]
    (estimate,) = estimate_advantages([group], config)
    ranks = Ranks(*(session(f"s{k}") for k in range(3)), session("late", "aborted"))
    ranks.scores = {f"s{k}": one.score for k, one in enumerate(group)}
    for k, returns in enumerate(RETURNS):
        found = await read(ranks, session(f"s{k}"), config)
        assert found.problem == "" and found.formula
        calls = [{"untrainable_reason": None, "propagated": value} for value in returns]
        shown = [found.of_call(call) for call in calls]
        assert shown == pytest.approx(estimate.advantages[k])
        assert found.mean == pytest.approx(sum(shown) / len(shown))
        assert found.of_call({"untrainable_reason": "discarded", "propagated": 1.0}) is None
    cut = {"untrainable_reason": None, "propagated": 1.0, "finish_reason": "length"}
    assert found.of_call(cut) is not None
    masks = train(**settings, mask_truncated="true")
    assert (await read(ranks, session("s0"), masks)).of_call(cut) is None


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        ({"preset": "reinforce_pp"}, Ranks(), "needs more than the group's scores"),
        ({"normalize_std": "batch"}, Ranks(), "the step's whole batch"),
        ({"group_by": "role"}, Ranks(), "each role's scores"),
        ({"overlong_length": 100, "overlong_buffer": 10}, Ranks(), "changes the returns"),
        ({}, Ranks(session("a"), missing=(1, 2)), "rank 1, 2 does not answer"),
        ({}, Ranks(session("a"), session("b", "rejected", reason="veto")), "b of its group"),
        ({}, Ranks(session("a"), session("b", "expired")), "group of one"),
        ({}, Ranks(*(session(f"s{k}") for k in range(MOST + 1))), f"more than {MOST} sessions"),
    ],
)
async def test_an_advantage_that_cannot_be_told_has_its_reason(
    settings: dict[str, Any], ranks: Ranks, words: str
) -> None:
    found = await read(ranks, session("a"), train(**settings))
    assert words in found.problem
    assert (found.mean, found.of_call({"untrainable_reason": None, "propagated": 1.0})) == (
        None,
    ) * 2


async def test_only_what_was_trained_on_has_an_advantage() -> None:
    for info in (session("a", "finalized"), session("a", content="archived")):
        assert await read(Ranks(), info, train()) is None
    assert (
        "compared with its batch"
        in (await read(Ranks(), session("a", group_id=None), train())).problem
    )
    assert "scored alike" in advantage(1.0, [1.0, 1.0], train()).problem
    assert "no call" in advantage(None, [1.0, 0.0], train()).problem


def group(*members: Member, more: bool = False, missing: tuple[int, ...] = ()) -> GroupPage:
    return GroupPage("g", (), members, more, missing)


@pytest.mark.parametrize("settings", [{"preset": "grpo"}, {"preset": "rloo"}])
async def test_a_groups_page_shows_the_advantages_of_its_sessions_pages(
    settings: dict[str, str],
) -> None:
    config = train(**settings)
    infos = [session("a"), session("b"), session("c"), session("late", "aborted")]
    scores = {"a": 1.0, "b": 0.3, "c": 0.0, "late": 1.0}
    ranks = Ranks(*infos)
    ranks.scores.update(scores)
    page = group(*(Member(info, None, score=scores[info["session_id"]]) for info in infos))
    told, words = advantages_of(page, config)
    alone = [await read(ranks, info, config) for info in infos[:3]]
    assert told == {info["session_id"]: one.mean for info, one in zip(infos, alone, strict=False)}
    # The others' mean is another one for each session.
    assert words == (alone[0].formula if settings["preset"] == "grpo" else "")


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (group(Member(session("a", "finalized"), None, score=1.0)), ""),
        (group(Member(session("a"), None, score=1.0)), "group of one"),
        (group(*2 * [Member(session("a"), None, score=1.0)], missing=(1,)), "rank 1 does not"),
        (group(*2 * [Member(session("a"), None, score=1.0)], more=True), "more than 2 sessions"),
        (
            group(Member(session("a"), None, score=1.0), Member(session("b"), None, "away")),
            "cannot be read",
        ),
        (group(*(Member(session(id), None, score=1.0) for id in "ab")), "scored alike"),
    ],
)
def test_a_groups_advantages_that_cannot_be_told_have_their_reason(
    page: GroupPage, words: str
) -> None:
    told, found = advantages_of(page, train())
    assert told == {} and words in found and bool(found) == bool(words)
