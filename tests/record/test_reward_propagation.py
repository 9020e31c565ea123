from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.record import discarded, propagate_rewards
from any_agent.types import Interaction
from tests.support.records import Make


def test_the_designs_worked_example_gives_its_rewards(make: Make) -> None:
    """Design: right; wrong then right; wrong, wrong; discount 0.9."""
    sessions = [
        [make("a", reward=1.0)],
        [make("a", reward=0.0), make("b", "a", reward=1.0)],
        [make("a", reward=0.0), make("b", "a", reward=0.0)],
    ]
    rewards = [list(propagate_rewards(s, discount=0.9).values()) for s in sessions]
    assert rewards == [[1.0], [0.9, 1.0], [0.0, 0.0]]


def test_final_reward_reaches_every_leaf(make: Make) -> None:
    """Compaction roots and sub-agents share the outcome."""
    nodes = [make("a"), make("b", "a", reward=0.5), make("root2"), make("c", "root2")]
    r = propagate_rewards(nodes, discount=0.5, final_reward=2.0)
    assert r == {"a": 1.25, "b": 2.5, "root2": 1.0, "c": 2.0}


def test_roots_with_other_tools_are_no_choices(make: Make) -> None:
    """Sub-agents that are asked the same but can do other things are no retries of each other."""
    search, write = ([{"type": "function", "function": {"name": n}}] for n in ("search", "write"))
    nodes = [make("a", asked="q", tools=search), make("b", asked="q", tools=write)]
    nodes += [make("c", asked="q", tools=search), make("d", "a")]
    assert discarded(nodes) == {"c"}
    assert propagate_rewards(nodes, final_reward=1.0) == {"a": 1.0, "b": 1.0, "c": 0.0, "d": 1.0}


def test_without_texts_a_request_is_known_by_its_ids(make: Make) -> None:
    nodes = [
        make("a", prompt=[1], message_delta=[]),
        make("b", prompt=[1], message_delta=[]),
        make("c", prompt=[2], message_delta=[]),
        make("d", "b"),
    ]
    assert discarded(nodes) == {"a"}


@pytest.mark.parametrize(
    "lost", [{"finish_reason": "abort"}, {"untrainable_reason": "undelivered"}]
)
def test_an_answer_that_the_agent_never_got_is_discarded(make: Make, lost: dict[str, str]) -> None:
    """Its parent is a leaf then, and its phantom 0 does not halve a mean."""
    alone = [make("a"), make("b", "a", **lost)]
    assert discarded(alone) == {"b"}
    assert propagate_rewards(alone, discount=0.5, final_reward=1.0) == {"a": 1.0, "b": 0.0}
    beside = [make("a"), make("b", "a", asked="q", **lost), make("c", "a", asked="q", reward=1.0)]
    assert propagate_rewards(beside) == {"a": 1.0, "b": 0.0, "c": 1.0}
    # Continued or rewarded by name, it did reach somebody.
    assert discarded([*alone, make("c", "b")]) == set()
    assert discarded([make("a"), make("b", "a", reward=0.0, **lost)]) == set()
    chain = [make("a"), make("b", "a", **lost), make("c", "b", **lost)]
    assert discarded(chain) == {"b", "c"}


def test_a_long_path_needs_no_recursion(make: Make) -> None:
    nodes = [make("0")] + [make(str(n), str(n - 1)) for n in range(1, 3000)]
    assert propagate_rewards(nodes, final_reward=1.0)["0"] == 1.0


TREES = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.sampled_from("xy"),
        st.none() | st.integers(-2, 2).map(float),
        st.sampled_from(["stop", "stop", "abort"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(shape=TREES, discount=st.sampled_from([0.0, 0.9, 1.0]), final=st.none() | st.just(1.0))
def test_propagated_rewards_equal_the_recursive_definition(
    make: Make,
    shape: list[tuple[int, str, float | None, str]],
    discount: float,
    final: float | None,
) -> None:
    nodes: list[Interaction] = []
    for n, (up, asked, reward, finish) in enumerate(shape):
        parent = nodes[up % n].id if n and up % 3 else None
        nodes.append(make(str(n), parent, asked=asked, reward=reward, finish_reason=finish))

    def below(id: str | None) -> list[Interaction]:
        return [n for n in nodes if n.parent_id == id]

    def gone(n: Interaction) -> bool:
        twins = [t for t in below(n.parent_id) if t.message_delta == n.message_delta]
        if not below(n.id) and any(below(t.id) for t in twins):
            return True
        phantom = n.finish_reason == "abort" and n.reward is None
        return phantom and all(gone(c) for c in below(n.id))

    def r(n: Interaction) -> float:
        if gone(n):
            return n.reward or 0.0
        children = [r(c) for c in below(n.id) if not gone(c)]
        if not children:
            return (n.reward or 0.0) + (final or 0.0)
        return (n.reward or 0.0) + discount * sum(children) / len(children)

    assert discarded(nodes) == {n.id for n in nodes if gone(n)}
    got = propagate_rewards(nodes, discount=discount, final_reward=final)
    assert got == pytest.approx({n.id: r(n) for n in nodes})
    copies = [replace(n) for n in nodes]
    assert propagate_rewards(copies, discount=discount, final_reward=final) == got


def test_the_same_request_of_two_roles_is_no_choice(make: Make) -> None:
    one, other = make("one"), make("other")
    one.message_delta = other.message_delta = [{"role": "user", "content": "same"}]
    one.prompt_delta_ids = other.prompt_delta_ids
    going_on = make("going on", "one")
    assert discarded([one, other, going_on]) == {"other"}
    other.request = {"role": "critic"}
    assert discarded([one, other, going_on]) == set()
