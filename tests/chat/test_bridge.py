"""What a bridge writes between two turns is what the template writes there."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from any_agent.chat import ChatFormat
from any_agent.types import Message
from tests.support.chat_templates import with_template
from tests.support.families import Call, Family, family

START: list[Message] = [{"role": "user", "content": "Sum 1 and 2, né?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name}. " * 3,
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    for name in ("add", "look")
]
USER: Message = {"role": "user", "content": "And 3? "}
THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


def bare(text: str) -> str:
    """Without thinking, which templates take out of earlier turns; gpt-oss ends these so."""
    text = text.replace("<|return|>", "<|end|>")
    return THINKING.sub("", text)


def called(calls: tuple[Call, ...]) -> Message:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": f"call{n:05d}",
                "type": "function",
                "function": {"name": c.name, "arguments": json.dumps(c.arguments)},
            }
            for n, c in enumerate(calls)
        ],
    }


def result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "content": text}


def assert_as_the_template(
    chat: ChatFormat, output: list[int], said: Message, new: list[Message], tools: Any
) -> list[int]:
    prompt = chat.render(START, tools)
    following = chat.bridge(output, new, tools, answer=said, prompt_tail=prompt[-64:])
    assert following is not None
    whole = chat.render([*START, said, *new], tools)
    assert whole[-len(following) :] == following
    before = chat.decode(whole[: -len(following)])
    if chat.name == "gpt-oss" and said.get("tool_calls"):
        return following  # Its models write the header of a call in another order.
    assert bare(before) == bare(chat.decode(prompt + output))
    return following


def test_results_after_calls_are_written_as_the_template_does(made: Family) -> None:
    for calls in ((Call("add", {"a": 1}),), (Call("add", {"a": 1}), Call("look", {"a": 2}))):
        if len(calls) > made.spec.calls:
            continue
        results = [result(n, f'{{"is": "{n}"}}') for n in range(len(calls))]
        for new in (results, [*results, USER]):
            assert_as_the_template(made.chat, made.say(calls=calls), called(calls), new, TOOLS)


def test_a_truncated_answer_gets_the_templates_end(made: Family) -> None:
    """The template's own end, then what follows an answer that ended by itself."""
    chat, output = made.chat, made.say("It is 3.")
    ended = chat.bridge(output, [USER], None)
    cut = chat.bridge(output[:-1], [USER], None)
    assert ended is not None and cut is not None
    assert cut[-len(ended) :] == ended
    if made.name != "unknown_plain":
        end = chat.decode(cut[: len(cut) - len(ended)])
        assert end == chat.decode(output[-1:]).replace("<|return|>", "<|end|>")


def test_a_sampled_end_stays_in_place_of_the_templates() -> None:
    """It was sampled, so it stays, in place of the template's own."""
    glm = family("glm").chat
    vocab = glm.tokenizer.get_vocab()
    following = glm.bridge([20, vocab["<|observation|>"]], [USER], None)
    assert following is not None
    assert glm.decode(following).startswith("<|user|>\nAnd 3?")
    llama = family("llama3").chat
    eom = llama.tokenizer.get_vocab()["<|eom_id|>"]
    other = llama.bridge([20, eom], [USER], None)
    assert other == llama.bridge([20, llama.stop_token_ids[0]], [USER], None)


def test_what_ended_inside_its_reasoning_goes_on_as_any_other() -> None:
    chat = family("qwen3_5", thinking=True).chat
    end = chat.stop_token_ids[:1]
    tail = chat.render(START, None)[-64:]
    assert chat.bridge(end, [USER], None, prompt_tail=tail) == chat.bridge([20, *end], [USER], None)


def test_an_inserted_answer_is_written_as_the_template_does(made: Family) -> None:
    """A rewritten or inserted answer is rendered, where the template takes it."""
    said = {"role": "assistant", "content": "It is 3."}
    new = [USER, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Hm"}]
    following = assert_as_the_template(made.chat, made.say("It is 3."), said, new, None)
    assert "No." in made.chat.decode(following)


TURN = "<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>"
ASKED = "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"


EACH, DONE = "{% for m in messages %}", "{% endfor %}"
TRIMMED = EACH + "<|im_start|>{{ m.role }} {{ m.content | trim }}<|im_end|>" + DONE + ASKED
PROVABLE = {
    "plain": EACH + TURN + DONE + ASKED,
    "trims": "{{ strftime_now('%Y') }}" + TRIMMED,
    "user and assistant in turn": (
        "{% set at = namespace(n=0) %}{% for m in messages %}{% if m.role != 'system' %}"
        "{% if (m.role == 'user') != (at.n % 2 == 0) %}{{ raise_exception('in turn') }}"
        "{% endif %}{% set at.n = at.n + 1 %}{% endif %}" + TURN + DONE + ASKED
    ),
    "ends only the last turn": (
        EACH + "<|im_start|>{{ m.role }} {{ m.content }}"
        "{% if loop.last or m.role != 'assistant' %}<|im_end|>{% endif %}" + DONE + ASKED
    ),
}
UNPROVABLE = {
    "time": "{{ strftime_now('%H:%M:%S.%f') }}" + TRIMMED,
    "numbers the turns": EACH + "{{ loop.index }}" + TURN + DONE + ASKED,
    "says how many there are": EACH + TURN + DONE + "{{ messages | length }}" + ASKED,
    "moves the system message": (
        EACH + "{% if m.role != 'system' %}"
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}"
        "{% endif %}" + TURN + "{% endif %}" + DONE + ASKED
    ),
    # Than what stands there once it is answered.
    "another prompt": EACH + TURN + DONE + ASKED.replace("assistant", "your turn:"),
    "keeps the last exchange": "{% for m in messages[-2:] %}" + TURN + DONE + ASKED,
}


@pytest.mark.parametrize("kind", PROVABLE | UNPROVABLE)
def test_only_templates_that_can_be_proven_are_bridged(tmp_path: Any, kind: str) -> None:
    template, provable = (PROVABLE | UNPROVABLE)[kind], kind in PROVABLE
    chat = with_template(tmp_path / "model", template, renderer="default")
    end = chat.stop_token_ids[0]
    output = [*chat.encode("yes", special=False), end]
    following = chat.bridge(output, [USER], None)
    assert (following is not None) == provable
    assert (chat.renderer.check_continuation(("user",)).refusal is None) == provable
    if following is not None:
        whole = chat.render([*START, {"role": "assistant", "content": "yes"}, USER], None)
        ours = chat.decode(chat.render(START, None) + output + following)
        assert ours.replace("<|im_end|>", "") == chat.decode(whole).replace("<|im_end|>", "")


def test_messages_that_the_template_merges_are_no_bridge(tmp_path: Any) -> None:
    """Two answers in a row become one turn, which what was sampled has ended already."""
    chat = with_template(
        tmp_path / "model",
        "{% for m in messages %}{% if loop.first or loop.previtem.role != m.role %}"
        "<|im_start|>{{ m.role }} {% endif %}{{ m.content }}"
        "{% if loop.last or loop.nextitem.role != m.role %}<|im_end|>{% endif %}{% endfor %}"
        + ASKED,
        renderer="default",
    )
    output = [*chat.encode("yes", special=False), chat.stop_token_ids[0]]
    assert chat.bridge(output, [{"role": "assistant", "content": "more"}, USER], None) is None
    assert chat.bridge(output, [USER, USER], None) is not None


def test_reasoning_is_kept_or_stripped_as_thinking_retention_says(tmp_path: Any) -> None:
    made = family("qwen3", thinking=True)
    output = made.say("x", reasoning="why")
    tools_result = [{"role": "tool", "tool_call_id": "1", "content": "x"}]
    for retention, goes_on in (("all", True), ("tool_cycle", False), ("template", False)):
        chat = made.load(thinking_retention=retention)
        assert (chat.bridge(output, [USER], None) is not None) == goes_on
        assert chat.keeps_thinking == goes_on
        reason = "template_declines" if goes_on else "thinking_stripped"
        assert chat.decline_reason([USER]) == reason
        assert chat.decline_reason(tools_result) == "template_declines"
    kept = made.load(thinking_retention="tool_cycle").bridge(output, tools_result, None)
    assert kept is not None
    without = family("qwen3").load(thinking_retention="template")
    assert without.bridge(output, [USER], None) is not None


def test_a_bridge_over_too_many_turns_is_declined() -> None:
    chat = family("qwen3").chat
    output = family("qwen3").say("x")
    assert chat.bridge(output, [USER] * 50, None) is not None
    mixed = [USER, {"role": "assistant", "content": "x"}] * 20
    assert chat.bridge(output, mixed, None) is None
