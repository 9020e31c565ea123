"""Bodies of all APIs: arbitrary ones, and ones that mean something; and arbitrary outputs."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.support.laws.talk import TOOLS

TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "<think>", "</think>x", "<tool_call>", "<|im_end|>", "<|start|>assistant", "\ud800"]
    ),
    st.sampled_from(["long " * 200, "long " * 30_000]),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
DICT = st.fixed_dictionaries


def typed(kind: str | st.SearchStrategy[str], **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """An object of a type, or of any of several; ``optional=`` fields may be absent."""
    optional = fields.pop("optional", {})
    kind = st.just(kind) if isinstance(kind, str) else kind
    return DICT({"type": kind, **fields}, optional=optional)


def some(each: Any, most: int = 2) -> st.SearchStrategy[list[Any]]:
    return st.lists(each, max_size=most)


PART = st.one_of(
    typed("text", text=TEXT),
    st.sampled_from(
        [
            {"type": "image_url", "image_url": {"url": "x"}},
            {"type": "input_audio"},
            {"type": "text"},
        ]
    ),
    JSON,
)
CONTENT = TEXT | st.none() | some(PART, 3) | JSON
ARGUMENTS = st.sampled_from(["{}", '{"a": 1}', '{"a"', "", "[]"]) | JSON
CALL = typed(
    "function", id=st.just("call_1"), function=DICT({"name": TEXT, "arguments": ARGUMENTS})
)
CHAT_ROLE = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "x"])
MESSAGE = JSON | DICT(
    {"role": CHAT_ROLE, "content": CONTENT},
    optional={
        "tool_calls": some(CALL | JSON),
        "tool_call_id": TEXT,
        "name": TEXT | st.none(),
        "reasoning_content": TEXT | JSON,
    },
)
SAID = st.one_of(
    # Noise, with every special token as likely as any other, and pieces of markup around it.
    st.lists(st.integers(0, 530), min_size=1, max_size=40),
    st.lists(st.integers(0, 24), min_size=1, max_size=12),
)
ROLE = st.sampled_from(["user", "assistant", "system", "developer", "tool", "x", None])
KINDS_OF_TEXT = ["input_text", "output_text", "refusal", "text", "input_image", "x"]
ITEM_TEXT = typed(st.sampled_from(KINDS_OF_TEXT), text=TEXT) | JSON
ITEM = st.one_of(
    DICT(
        {"role": ROLE, "content": TEXT | some(ITEM_TEXT, 3) | JSON},
        optional={"type": st.just("message"), "id": TEXT, "status": TEXT},
    ),
    typed("function_call", call_id=TEXT, name=TEXT, arguments=ARGUMENTS, optional={"id": TEXT}),
    typed("function_call_output", call_id=TEXT, output=CONTENT),
    typed(
        "reasoning",
        optional={
            "id": TEXT,
            "summary": some(ITEM_TEXT) | JSON,
            "content": some(ITEM_TEXT) | JSON,
            "encrypted_content": TEXT | st.sampled_from(["aa1.", "aa1.%%", "aa1._w=="]) | JSON,
        },
    ),
    typed(st.sampled_from(["item_reference", "web_search_call"])),
    typed("item_reference", id=TEXT),
    JSON,
)
REFERENCE = typed("tool_reference", tool_name=st.sampled_from(["add", "later"]) | TEXT)
RESULT = st.recursive(
    TEXT | JSON, lambda inner: some(typed("text", text=inner) | REFERENCE), max_leaves=4
)
BLOCK = st.one_of(
    typed("text", text=TEXT),
    typed("thinking", thinking=TEXT | JSON, optional={"signature": TEXT}),
    typed("redacted_thinking", optional={"data": TEXT | JSON}),
    typed("tool_use", id=TEXT, name=TEXT, input=JSON),
    typed(
        "tool_result",
        tool_use_id=TEXT,
        optional={"content": RESULT, "is_error": st.booleans() | JSON},
    ),
    typed(st.sampled_from(["image", "document", "x"])),
    JSON,
)
TURN = JSON | DICT({"role": ROLE, "content": TEXT | some(BLOCK, 3) | JSON})
SOUND_ITEM = st.one_of(
    DICT({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT}),
    typed(
        "function_call",
        call_id=st.just("c"),
        name=st.just("add"),
        arguments=st.sampled_from(["{}", '{"a": 1}', '{"a"', ""]),
    ),
    typed("function_call_output", call_id=st.just("c"), output=TEXT),
)
USE = typed("tool_use", id=st.just("c"), name=st.just("add"), input=DICT({"a": JSON}))
SOUND_BLOCKS = st.lists(typed("text", text=TEXT) | USE, min_size=1, max_size=2)
USED = typed(
    "tool_result",
    tool_use_id=st.just("c"),
    content=TEXT | st.lists(REFERENCE, min_size=1, max_size=2),
)
SOUND_TURN = st.one_of(
    DICT({"role": st.sampled_from(["user", "assistant"]), "content": TEXT}),
    DICT({"role": st.just("assistant"), "content": SOUND_BLOCKS}),
    DICT({"role": st.just("user"), "content": st.tuples(USED).map(list)}),
)
SOUND = {
    "responses": DICT(
        {"input": st.lists(SOUND_ITEM, min_size=1, max_size=4)}, optional={"instructions": TEXT}
    ),
    "messages": DICT(
        {
            "messages": st.lists(SOUND_TURN, min_size=1, max_size=4),
            "max_tokens": st.just(64),
        },
        optional={"system": TEXT},
    ),
}
"""Bodies most of which are answered, if what they say can be."""
WILD = {
    "responses": DICT(
        {"input": some(ITEM, 5) | TEXT | JSON},
        optional={
            "instructions": TEXT | JSON,
            "previous_response_id": TEXT | JSON,
            "include": some(TEXT) | JSON,
            "reasoning": JSON,
            "text": JSON,
            "metadata": JSON,
        },
    ),
    "messages": DICT(
        {"messages": some(TURN, 5) | JSON, "max_tokens": st.just(64) | JSON},
        optional={
            "system": TEXT | some(BLOCK) | JSON,
            "thinking": JSON,
            "output_config": JSON,
            "stop_sequences": some(TEXT) | JSON,
        },
    ),
}
BODIES = {name: SOUND[name] | WILD[name] for name in WILD}
BODIES["chat"] = DICT({"messages": some(MESSAGE, 5)})
FIXED = {
    "chat": {"tools": TOOLS},
    "responses": {"tools": [{"type": "function", **TOOLS[0]["function"]}]},
    "messages": {
        "tools": [
            {"name": "add", "input_schema": {"type": "object"}},
            {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True},
        ]
    },
}
