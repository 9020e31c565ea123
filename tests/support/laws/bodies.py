"""Bodies of all APIs: arbitrary ones, and ones that mean something; and arbitrary outputs."""

from __future__ import annotations

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
PART = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, TEXT),
    st.sampled_from(
        [
            {"type": "image_url", "image_url": {"url": "x"}},
            {"type": "input_audio"},
            {"type": "text"},
        ]
    ),
    JSON,
)
CONTENT = st.one_of(TEXT, st.none(), st.lists(PART, max_size=3), JSON)
CALL = st.one_of(
    st.builds(
        lambda name, arguments: {
            "id": "call_1",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
        TEXT,
        st.sampled_from(["{}", '{"a": 1}', '{"a"', "", "[]"]) | JSON,
    ),
    JSON,
)
CHAT_ROLE = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", "x"])
MESSAGE = st.one_of(
    st.fixed_dictionaries(
        {"role": CHAT_ROLE, "content": CONTENT},
        optional={
            "tool_calls": st.lists(CALL, max_size=2),
            "tool_call_id": TEXT,
            "name": TEXT | st.none(),
            "reasoning_content": TEXT | JSON,
        },
    ),
    JSON,
)
SAID = st.one_of(
    # Noise, with every special token as likely as any other, and pieces of markup around it.
    st.lists(st.integers(0, 530), min_size=1, max_size=40),
    st.lists(st.integers(0, 24), min_size=1, max_size=12),
)
ROLE = st.sampled_from(["user", "assistant", "system", "developer", "tool", "x", None])
ITEM_TEXT = st.one_of(
    st.builds(
        lambda kind, text: {"type": kind, "text": text},
        st.sampled_from(["input_text", "output_text", "refusal", "text", "input_image", "x"]),
        TEXT,
    ),
    JSON,
)
ARGUMENTS = st.sampled_from(["{}", '{"a": 1}', '{"a"', "", "[]"]) | JSON
ITEM = st.one_of(
    st.fixed_dictionaries(
        {"role": ROLE, "content": st.one_of(TEXT, st.lists(ITEM_TEXT, max_size=3), JSON)},
        optional={"type": st.just("message"), "id": TEXT, "status": TEXT},
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call"), "call_id": TEXT, "name": TEXT, "arguments": ARGUMENTS},
        optional={"id": TEXT},
    ),
    st.fixed_dictionaries(
        {"type": st.just("function_call_output"), "call_id": TEXT, "output": CONTENT}
    ),
    st.fixed_dictionaries(
        {"type": st.just("reasoning")},
        optional={
            "id": TEXT,
            "summary": st.lists(ITEM_TEXT, max_size=2) | JSON,
            "content": st.lists(ITEM_TEXT, max_size=2) | JSON,
            "encrypted_content": TEXT | st.sampled_from(["aa1.", "aa1.%%", "aa1._w=="]) | JSON,
        },
    ),
    st.fixed_dictionaries({"type": st.sampled_from(["item_reference", "web_search_call"])}),
    st.fixed_dictionaries({"type": st.just("item_reference"), "id": TEXT}),
    JSON,
)
REFERENCE = st.builds(
    lambda name: {"type": "tool_reference", "tool_name": name},
    st.sampled_from(["add", "later"]) | TEXT,
)
BLOCK = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, TEXT),
    st.fixed_dictionaries(
        {"type": st.just("thinking"), "thinking": TEXT | JSON}, optional={"signature": TEXT}
    ),
    st.fixed_dictionaries({"type": st.just("redacted_thinking")}, optional={"data": TEXT | JSON}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "id": TEXT, "name": TEXT, "input": JSON}),
    st.fixed_dictionaries(
        {"type": st.just("tool_result"), "tool_use_id": TEXT},
        optional={
            "content": st.recursive(
                TEXT | JSON,
                lambda inner: st.lists(
                    st.builds(lambda text: {"type": "text", "text": text}, inner) | REFERENCE,
                    max_size=2,
                ),
                max_leaves=4,
            ),
            "is_error": st.booleans() | JSON,
        },
    ),
    st.fixed_dictionaries({"type": st.sampled_from(["image", "document", "x"])}),
    JSON,
)
TURN = st.one_of(
    st.fixed_dictionaries(
        {"role": ROLE, "content": st.one_of(TEXT, st.lists(BLOCK, max_size=3), JSON)}
    ),
    JSON,
)
SOUND = {
    "responses": st.fixed_dictionaries(
        {
            "input": st.lists(
                st.one_of(
                    st.fixed_dictionaries(
                        {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT}
                    ),
                    st.fixed_dictionaries(
                        {
                            "type": st.just("function_call"),
                            "call_id": st.just("c"),
                            "name": st.just("add"),
                            "arguments": st.sampled_from(["{}", '{"a": 1}', '{"a"', ""]),
                        }
                    ),
                    st.fixed_dictionaries(
                        {
                            "type": st.just("function_call_output"),
                            "call_id": st.just("c"),
                            "output": TEXT,
                        }
                    ),
                ),
                min_size=1,
                max_size=4,
            )
        },
        optional={"instructions": TEXT},
    ),
    "messages": st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.one_of(
                    st.fixed_dictionaries(
                        {"role": st.sampled_from(["user", "assistant"]), "content": TEXT}
                    ),
                    st.fixed_dictionaries(
                        {
                            "role": st.just("assistant"),
                            "content": st.lists(
                                st.builds(lambda text: {"type": "text", "text": text}, TEXT)
                                | st.builds(
                                    lambda value: {
                                        "type": "tool_use",
                                        "id": "c",
                                        "name": "add",
                                        "input": {"a": value},
                                    },
                                    JSON,
                                ),
                                min_size=1,
                                max_size=2,
                            ),
                        }
                    ),
                    st.builds(
                        lambda text: {
                            "role": "user",
                            "content": [
                                {"type": "tool_result", "tool_use_id": "c", "content": text}
                            ],
                        },
                        TEXT | st.lists(REFERENCE, min_size=1, max_size=2),
                    ),
                ),
                min_size=1,
                max_size=4,
            ),
            "max_tokens": st.just(64),
        },
        optional={"system": TEXT},
    ),
}
"""Bodies most of which are answered, if what they say can be."""
WILD = {
    "responses": st.fixed_dictionaries(
        {"input": st.one_of(st.lists(ITEM, max_size=5), TEXT, JSON)},
        optional={
            "instructions": TEXT | JSON,
            "previous_response_id": TEXT | JSON,
            "include": st.lists(TEXT, max_size=2) | JSON,
            "reasoning": JSON,
            "text": JSON,
            "metadata": JSON,
        },
    ),
    "messages": st.fixed_dictionaries(
        {"messages": st.one_of(st.lists(TURN, max_size=5), JSON), "max_tokens": st.just(64) | JSON},
        optional={
            "system": st.one_of(TEXT, st.lists(BLOCK, max_size=2), JSON),
            "thinking": JSON,
            "output_config": JSON,
            "stop_sequences": st.lists(TEXT, max_size=2) | JSON,
        },
    ),
}
BODIES = {name: SOUND[name] | WILD[name] for name in WILD}
BODIES["chat"] = st.fixed_dictionaries({"messages": st.lists(MESSAGE, max_size=5)})
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
