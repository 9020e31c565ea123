from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from any_agent.record import InteractionTree
from any_agent.types import Continuation
from tests.support.errors import fails_with
from tests.support.records import Make


def test_a_path_joins_the_prompts_and_outputs_of_its_interactions(make: Make) -> None:
    tree = InteractionTree()
    tree.add(make("a", prompt=[1, 2], output=[3]), b"ka")
    tree.add(make("b", "a", prompt=[4], output=[5, 6]), b"kb")
    tree.add(make("c", "b", prompt=[7], output=[8]), b"kc")
    ids = tree.prompt_ids("c")
    assert ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert ids.dtype == np.int32
    assert [m["content"] for m in tree.messages("c")] == ["a", "answer a", "b", "answer b", "c"]
    assert [n.id for n in tree.path("c")] == ["a", "b", "c"]
    assert [n.id for n in tree] == ["a", "b", "c"]
    assert (len(tree), "a" in tree, "x" in tree) == (3, True, False)
    assert [n.id for n in tree.children("a")] == ["b"]
    assert [n.id for n in tree.children(None)] == ["a"]
    assert [n.id for n in tree if not tree.children(n.id)] == ["c"]
    assert tree["b"].id == "b"
    assert tree.get("x") is None
    assert tree.key("b") == b"kb"


def test_interactions_are_found_by_what_was_said(make: Make) -> None:
    said, head, other = b"m" * 16, b"h" * 16, b"o" * 16
    tree = InteractionTree()
    tree.add(make("a"), said + head)
    tree.add(make("b"), said + other)
    tree.add(make("c"), b"n" * 16 + head)
    tree.add(make("d"))
    assert [i.id for i in tree.with_messages(said + head)] == ["a", "b"]
    assert [i.id for i in tree.with_messages(b"x" * 32)] == []
    assert tree.knows_head(b"x" * 16 + head)
    assert not tree.knows_head(said + b"x" * 16)
    assert (tree.key("a"), tree.key("d")) == (said + head, None)


TURNS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3), st.integers(0, 3)), max_size=25)


@given(turns=TURNS, asked=st.lists(st.integers(0, 24), max_size=40))
def test_prompts_and_paths_are_those_given_in_whatever_order_they_are_asked_for(
    make: Make, turns: list[tuple[int, int, int]], asked: list[int]
) -> None:
    tree = InteractionTree()
    prompts: list[list[int]] = []
    paths: list[list[int]] = []
    for n, (up, delta, output) in enumerate(turns):
        parent = up % n if n and up % 5 else None
        new = [100 * n + k for k in range(delta)]
        said = [100 * n + 50 + k for k in range(output)]
        prompts.append([*(paths[parent] if parent is not None else []), *new])
        paths.append([*prompts[n], *said])
        id = None if parent is None else str(parent)
        tree.add(make(str(n), id, prompt=new, output=said))
    for at in (at for at in (*asked, *range(len(turns))) if at < len(turns)):
        assert tree.prompt_ids(str(at)).tolist() == prompts[at]
        ids = tree.path_ids(str(at))
        assert (ids.tolist(), ids.dtype) == (paths[at], np.int32)
    # Never more than a few paths.
    assert tree.extra_bytes <= 4 * 4 * sum(d + o for _, d, o in turns)
    again = InteractionTree.from_interactions(tree)
    assert [again.prompt_ids(n.id).tolist() for n in again] == prompts


def test_a_path_that_goes_on_is_kept_once(make: Make) -> None:
    tree = InteractionTree()
    for n in range(20):
        tree.add(make(str(n), str(n - 1) if n else None))
        assert tree.extra_bytes == 4 * (5 * n if n else 0)
        ids = tree.path_ids(str(n))
        assert tree.extra_bytes == ids.nbytes == 4 * 5 * (n + 1)
        assert tree.path_ids(str(n)) is ids
    with fails_with(ValueError, "read-only"):
        ids[0] = 1


def test_the_last_interaction_is_the_last_one_that_the_agent_got(make: Make) -> None:
    tree = InteractionTree()
    with pytest.raises(LookupError):
        tree.last()
    tree.add(make("a", finish_reason="abort"))
    assert tree.last().id == "a"
    tree.add(make("b"))
    tree.add(make("c", untrainable_reason="undelivered"))
    assert tree.last().id == "b"


def test_an_interaction_that_does_not_fit_the_tree_is_refused(make: Make) -> None:
    tree = InteractionTree()
    tree.add(make("a"), b"a")
    for wrong, names in (
        (make("a"), ["interaction a"]),
        (make("b", "x"), ["interaction b", "parent x"]),
        (make("b", "a", continuation=Continuation.BRANCH), ["continuation branch"]),
        (make("b", continuation=Continuation.EXACT), ["continuation exact"]),
    ):
        with fails_with(ValueError, *names):
            tree.add(wrong, b"b")
    assert len(tree) == 1
