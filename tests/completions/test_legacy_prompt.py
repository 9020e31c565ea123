"""Prompts of legacy completions: what is recorded is never encoded again, nor said twice."""

from __future__ import annotations

import numpy as np
import pytest

from any_agent.chat import ChatFormat
from any_agent.completions.legacy_prompt import (
    TextInput,
    digests,
    find_text_past,
    text_key,
    text_prompt_of,
)
from any_agent.completions.prompt import Prompt
from any_agent.record import InteractionTree
from any_agent.types import (
    Continuation,
    id_array,
)
from tests.support.chat_templates import sentencepiece_like
from tests.support.families import family
from tests.support.records import make_interaction

ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def after(
    chat: ChatFormat, prompt: TextInput, output: list[int], says: str, then: TextInput
) -> Prompt:
    """The prompt of a request that comes after a recorded one."""
    tree = InteractionTree()
    first = text_prompt_of(prompt, find_text_past(prompt, tree, chat, 1000), tree, chat)
    kept = digests(prompt, np.concatenate([first.ids, id_array(output)]), says)
    said = {"role": "completion", "content": says}
    interaction = make_interaction(
        "i",
        prompt=first.ids,
        output=output,
        message_delta=[],
        output_message=said,
        request={"text": kept},
    )
    tree.add(interaction, text_key(kept))
    return text_prompt_of(then, find_text_past(then, tree, chat, 1000), tree, chat)


@pytest.mark.parametrize("more", ["<|im_end|>\n<|im_start|>user\nmore", "<|im_end|>"])
def test_a_turn_that_ended_is_not_ended_twice(more: str) -> None:
    """The text of an answer is without its end, which agents that write their own turns add."""
    qwen = family("qwen3")
    output = qwen.say("It is 3.")
    made = after(qwen.chat, ASKED, output, "It is 3.", f"{ASKED}It is 3.{more}")
    assert made.continuation is Continuation.EXACT
    assert made.ids.tolist() == qwen.encode(f"{ASKED}It is 3.{more}")
    assert made.added == more


def test_half_a_character_is_kept_as_it_was_sampled() -> None:
    qwen = family("qwen3")
    broken = qwen.encode("a") + qwen.encode("𝄞")[:1]
    said = qwen.chat.decode(broken)
    assert said == "a\ufffd"
    made = after(qwen.chat, "x", broken, said, f"x{said} and")
    assert made.ids.tolist() == [*qwen.encode("x"), *broken, *qwen.encode(" and")]


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    """Of a tokenizer that begins every text with a space, as Llama 2's."""
    template = "{% for m in messages %}a: {{ m.content }}</s>{% endfor %}b:"
    return sentencepiece_like(tmp_path_factory.mktemp("spaced"), "first", template)


@pytest.mark.parametrize(
    ("more", "how"),
    [(" ab", Continuation.EXACT), ("  ab", Continuation.EXACT), ("ab", Continuation.BRANCH)],
)
def test_no_space_is_put_between_a_recorded_text_and_the_next(
    spaced: ChatFormat, more: str, how: Continuation
) -> None:
    output = spaced.encode(" cd", special=False)
    made = after(spaced, "ab", output, " cd", f"ab cd{more}")
    assert spaced.decode(made.ids) == f"ab cd{more}"
    assert made.continuation is how
    assert made.branch_reason == (None if how is Continuation.EXACT else "template_declines")
