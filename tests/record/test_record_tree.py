from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_lab import Make

from any_agent.record import InteractionTree
from any_agent.types import Continuation


def test_a_path_is_put_together(make: Make) -> None:
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
    assert [n.id for n in tree.leaves()] == ["c"]
    assert tree["b"].id == "b"
    assert tree.get("x") is None
    assert tree.key("b") == b"kb"


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 99), st.lists(st.integers(0, 9), max_size=4),
                  st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=15)
)  # fmt: skip
def test_prompts_are_those_given_at_creation(
    make: Make, turns: list[tuple[int, list[int], list[int]]]
) -> None:
    tree = InteractionTree()
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    for n, (up, delta, output) in enumerate(turns):
        parent = up % n if n and up % 3 else None
        before = [] if parent is None else prompts[parent] + outputs[parent]
        prompts.append(before + delta)
        outputs.append(output)
        id = None if parent is None else str(parent)
        tree.add(make(str(n), id, prompt=delta, output=output))
    for n, prompt in enumerate(prompts):
        assert tree.prompt_ids(str(n)).tolist() == prompt
    again = InteractionTree.from_interactions(tree, [None] * len(tree))
    assert [n.id for n in again.leaves()] == [n.id for n in tree.leaves()]


def test_a_thousand_turns(make: Make) -> None:
    tree = InteractionTree()
    for n in range(1500):
        tree.add(make(str(n), str(n - 1) if n else None), str(n).encode())
    assert len(tree.prompt_ids("1499")) == 1500 * 5 - 2
    assert len(tree.messages("1499")) == 1500 * 2 - 1


def keys(*messages: str) -> list[bytes]:
    running = hashlib.sha256()
    out = []
    for m in messages:
        running.update(m.encode())
        out.append(running.digest())
    return out


def test_the_longest_prefix_is_found(make: Make) -> None:
    tree = InteractionTree()
    chain = keys("u1", "a1", "u2", "a2", "u3")
    tree.add(make("a"), chain[1])
    tree.add(make("b", "a"), chain[3])
    assert tree.find(chain) == (tree["b"], 4)
    assert tree.find(chain[:3]) == (tree["a"], 2)
    assert tree.find(chain[:2]) == (tree["a"], 2)
    assert tree.find(chain[:1]) is None
    assert tree.find([]) is None
    assert tree.find(keys("u1", "other", "u2")) is None


def test_of_several_the_latest_or_the_one_that_thought_so(make: Make) -> None:
    tree = InteractionTree()
    for id, thought in (("a", "one"), ("b", "two"), ("c", None)):
        message = {"role": "assistant", "content": "x", "reasoning_content": thought}
        tree.add(make(id, output_message=message), b"k")

    def found(message: object) -> str:
        match = tree.find([b"k"], [message])  # type: ignore[list-item]
        assert match is not None
        return match[0].id

    assert found({"role": "assistant", "content": "x"}) == "c"
    assert found({"role": "assistant", "content": "x", "reasoning_content": "one"}) == "a"
    assert found({"role": "assistant", "content": "x", "reasoning_content": "none"}) == "c"
    assert found({"role": "assistant", "reasoning_content": ["one"]}) == "c"
    assert found(5) == "c"


def test_aborted_interactions_are_no_parents(make: Make) -> None:
    tree = InteractionTree()
    tree.add(make("a"), b"k")
    tree.add(make("b", finish_reason="abort"), b"k")
    match = tree.find([b"k"])
    assert match is not None and match[0].id == "a"


def test_last_is_what_the_agent_got(make: Make) -> None:
    tree = InteractionTree()
    with pytest.raises(LookupError):
        tree.last()
    tree.add(make("a", finish_reason="abort"))
    assert tree.last().id == "a"
    tree.add(make("b"))
    tree.add(make("c", untrainable_reason="undelivered"))
    assert tree.last().id == "b"


def test_of_two_equal_answers_the_one_that_was_received_is_continued(make: Make) -> None:
    tree = InteractionTree()
    tree.add(make("a"), b"same")
    tree.add(make("b", untrainable_reason="undelivered"), b"same")
    found = tree.find([b"same"])
    assert found is not None and found[0].id == "a"
    tree["a"].untrainable_reason = "undelivered"
    found = tree.find([b"same"])
    assert found is not None and found[0].id == "b"


def test_what_cannot_be_added(make: Make) -> None:
    tree = InteractionTree()
    tree.add(make("a"), b"a")
    with pytest.raises(ValueError, match="recorded already"):
        tree.add(make("a"), b"a")
    with pytest.raises(ValueError, match="parent x is not recorded"):
        tree.add(make("b", "x"), b"b")
    with pytest.raises(ValueError, match="continuation"):
        tree.add(make("b", "a", continuation=Continuation.BRANCH), b"b")
    with pytest.raises(ValueError, match="continuation"):
        tree.add(make("b", continuation=Continuation.EXACT), b"b")
    assert len(tree) == 1
