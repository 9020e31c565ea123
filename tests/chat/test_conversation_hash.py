from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from any_agent.chat import chain_keys, key_parts, normalise

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=5), c, max_size=3),
    max_leaves=8,
)
FIELDS = ("role", "content", "name", "tool_calls", "reasoning_content", "type", "text", "function")
SHAPED = st.dictionaries(st.sampled_from(FIELDS), JSON | st.lists(
    st.dictionaries(st.sampled_from((*FIELDS, "arguments")), JSON, max_size=3), max_size=2
))  # fmt: skip


@settings(max_examples=300)
@given(messages=st.lists(JSON | SHAPED, max_size=4), tools=st.none() | st.lists(JSON, max_size=2),
       cut=st.integers(0, 4))  # fmt: skip
@pytest.mark.service
def test_any_json_value_has_a_key(messages: list[Any], tools: Any, cut: int) -> None:
    keys = chain_keys(messages, tools)
    assert len(keys) == len(messages) and all(len(k) == 32 for k in keys)
    assert keys == chain_keys(json.loads(json.dumps(messages)), tools)
    if keys and 0 < cut <= len(messages):
        head = chain_keys(messages[:cut], tools)
        if any(key_parts(head[-1])[0]):
            # Not amid the system prompt.
            rest = chain_keys(messages[cut:], tools, start=head[-1], before=messages[:cut])
            assert head + rest == keys


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    entry = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [entry | more]}


def said(content: Any, role: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


EMPTY = {"content": "", "refusal": None, "audio": None}
SAME: list[tuple[Any, Any]] = [
    (said("ab", "user"), {"content": "ab", "role": "user", "name": None}),
    (said("ab", "user"), said([{"type": "text", "text": t} for t in "ab"], "user")),
    (said("x", "developer"), said("x", "system")),
    (call('{"a": 1, "b": 2}'), call('{"b":2,"a":1}', id="other", index=0)),
    (call('{"a": 1}'), call({"a": 1})),
    (call("{}"), call("{}") | EMPTY),
    (said("x", reasoning_content="why"), said("x", tool_calls=[], annotations=[])),
    (call('{"a": 1.0, "b": [1e3, -0.0]}'), call('{"a":1,"b":[1000,0]}')),
    (call('{"a": "\\u00e9"}'), call('{"a":"\u00e9"}')),
    (call({"a": 2.0}), call('{"a": 2}')),
    (call(""), call("{}")),
    (
        said("\n x \n", reasoning="why", function_call=None),
        said("<think>\nwhy\n</think>\n\nx"),
    ),
    (said(None), {"role": "assistant"}),
    (said("x", "tool", tool_call_id="a"), said("x", "tool", tool_call_id="b")),
]
OTHER: list[tuple[Any, Any]] = [
    (said("ab", "user"), said("ab ", "user")),
    (said("x", "user"), said("x", "user", name="n")),
    (said("x", "user"), said("x", "system")),
    (said("1", "user"), said(1, "user")),
    *((call('{"a": 1}'), call(other)) for other in ('{"a": 2}', '{"a": 1', '{"a": true}')),
    (call('"x"'), call("x")),
    (call('{"a": 1}'), call('{"a": "1"}')),
    (call('{"a": 1e400}'), call('{"a": 1e500}')),
    (call('{"a": 1e400}'), call('{"a": {"number": "1e400"}}')),
    (call('{"a": NaN}'), call('{"a": null}')),
    (said(None, refusal="no"), {"role": "assistant"}),
    (said("a  b"), said("a b")),
    (said("<think>a</think>b", "user"), said("b", "user")),
    (call("{}"), call("{}") | {"content": "x"}),
    ("\ud800", "?"),
    (10**5000, 10**5000 + 1),
]


def test_the_same_conversation_has_one_key_and_another_one_another() -> None:
    for a, b in SAME:
        assert normalise(a) == normalise(b)
        assert chain_keys([a], None) == chain_keys([b], [])
    for a, b in OTHER:
        assert chain_keys([a], None) != chain_keys([b], None)


def test_a_merged_system_prompt_has_the_same_key() -> None:
    def key(*messages: tuple[str, str]) -> bytes:
        said = [{"role": role, "content": text} for role, text in messages]
        return chain_keys([*said, {"role": "user", "content": "x"}], None)[-1]

    one = key(("system", "a\nb"))
    assert key(("system", "a"), ("system", "b")) == one
    assert key(("developer", "a\n"), ("system", "\n\nb")) == one
    assert key(("system", "a\n\nb")) == one
    others = [
        key(("system", "a b")),
        key(("system", "b"), ("system", "a")),
        key(("system", "a")),
        key(("system", "")),
        key(),
        key(("system", "a"), ("user", "b")),
        key(("user", "x"), ("system", "a\nb")),
        key(("system", "a"), ("user", "x"), ("system", "b")),
    ]
    assert len({one, *others}) == len(others) + 1


def test_a_key_says_in_what_conversations_differ() -> None:
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    said, head, tools = key_parts(chain_keys([system, user], None)[-1])
    others = {
        "system": chain_keys([user], None)[-1],
        "tools": chain_keys([system, user], [{"type": "function"}])[-1],
        "template": chain_keys([system, user], None, template=b"x")[-1],
        "said": chain_keys([system, user, user], None)[-1],
    }
    parts = {name: key_parts(key) for name, key in others.items()}
    assert [p[0] == said for p in parts.values()] == [True, True, True, False]
    assert [p[1] == head for p in parts.values()] == [False, True, True, True]
    assert [p[2] == tools for p in parts.values()] == [True, False, False, True]


def asks(*ids: str) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": "f"}} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(id: str | None, content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": id}


def test_a_key_tells_which_call_a_result_answers() -> None:
    def key(*messages: dict[str, Any]) -> bytes:
        return chain_keys([{"role": "user", "content": "u"}, *messages], None)[-1]

    one = key(asks("a", "b"), result("a", "x"), result("b", "y"))
    assert key(asks("p", "q"), result("p", "x"), result("q", "y")) == one
    assert key(asks("p", "q"), result(None, "x"), result(None, "y")) == one
    # The same texts, but of the other call.
    assert key(asks("a", "b"), result("b", "x"), result("a", "y")) != one
    cut = chain_keys([asks("a", "b"), result("a", "x")], None)
    for before in ([asks("a", "b"), result("a", "x")], [asks("c", "b"), result("c", "x")]):
        (rest,) = chain_keys([result("b", "y")], None, start=cut[-1], before=before)
        assert rest == chain_keys([asks("a", "b"), result("a", "x"), result("b", "y")], None)[-1]


TEXT = st.text(st.sampled_from('ab \n<{"é1'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from((0.5, 2.0)) | TEXT,
    lambda c: st.lists(c, max_size=2) | st.dictionaries(TEXT, c, max_size=2),
    max_leaves=4,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A system prompt, perhaps, and turns with and without calls."""
    out: list[dict[str, Any]] = [
        {"role": "system", "content": text} for text in draw(st.lists(TEXT, max_size=2))
    ]
    for turn in range(draw(st.integers(1, 3))):
        out.append({"role": "user", "content": draw(TEXT)})
        said: dict[str, Any] = {"role": "assistant", "content": draw(TEXT)}
        arguments = draw(st.lists(st.dictionaries(TEXT, VALUES, max_size=2), max_size=2))
        if arguments:
            said["tool_calls"] = [
                {
                    "id": f"call_{turn}_{k}",
                    "type": "function",
                    "function": {"name": draw(st.sampled_from("fg")), "arguments": json.dumps(a)},
                }
                for k, a in enumerate(arguments)
            ]
        out.append(said)
        out += [
            {"role": "tool", "content": draw(TEXT), "tool_call_id": f"call_{turn}_{k}"}
            for k in draw(st.permutations(range(len(arguments))))
        ]
    return out


def javascript(value: Any) -> Any:
    """Numbers as a language with one kind of them writes them."""
    if isinstance(value, dict):
        return {k: javascript(v) for k, v in value.items()}
    if isinstance(value, list):
        return [javascript(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def meaning(messages: list[dict[str, Any]]) -> str:
    """What a conversation says, found out in another way than keys do."""
    system: list[str] = []
    while messages and messages[0]["role"] == "system":
        system += [line for line in messages[0]["content"].split("\n") if line.strip()]
        messages = messages[1:]
        system = system or [""]
    said: list[Any] = [[line for line in system if line], bool(system)]
    ids: list[str] = []
    for m in messages:
        content = m["content"].strip() if m["role"] == "assistant" else m["content"]
        calls = m.get("tool_calls", [])
        ids = [c["id"] for c in calls] if calls else ids
        args = [[c["function"]["name"], json.loads(c["function"]["arguments"])] for c in calls]
        which = ids.index(m["tool_call_id"]) if m["role"] == "tool" else None
        said.append([m["role"], content, javascript(args), which])
    return json.dumps(said, sort_keys=True)


@settings(deadline=None, max_examples=100)
@given(conversations(), conversations(), st.data())
def test_another_meaning_has_another_key(
    one: list[dict[str, Any]], other: list[dict[str, Any]], data: st.DataObject
) -> None:
    """Two conversations, mostly ones that differ in little: equal keys only for equal meanings."""
    if data.draw(st.booleans()):
        other = copy.deepcopy(one)
        at = data.draw(st.integers(0, len(one) - 1))
        if other[at].get("tool_calls") and data.draw(st.booleans()):
            arguments = data.draw(st.dictionaries(TEXT, VALUES, max_size=1))
            other[at]["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments)
        else:
            other[at]["content"] = data.draw(TEXT)
    same = chain_keys(one, None)[-1] == chain_keys(other, None)[-1]
    assert same == (meaning(one) == meaning(other))


def test_deeply_nested_content_has_a_key_of_its_own() -> None:
    deep: Any = "x"
    for _ in range(50_000):
        deep = [deep]
    other: Any = "y"
    for _ in range(50_000):
        other = {"k": other}
    keys = {chain_keys([{"role": "user", "content": v}], None)[0] for v in (deep, other, [deep])}
    assert len(keys) == 3
