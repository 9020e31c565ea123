"""Grammars of a text or calls: what a family's models write is in them, and nothing else."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from any_agent.engine.embedded.grammar import lark_of, tokens_of
from any_agent.engine.embedded.model_loader import LoadedModel
from tests.support.families import Call, Family, family

FAMILIES = [("qwen3", False), ("qwen3_5", False), ("qwen3_5", True), ("glm", False)]
FAMILIES += [("deepseek", False), ("deepseek_r1", False), ("gpt_oss", False)]
ASK: list[Any] = [{"role": "user", "content": "hi"}]
NAMES = ["add", "find"]
VALUE = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}
TEXT = {"type": "json_schema", "json_schema": {**VALUE, "additionalProperties": False}}


@cache
def vocabulary(fam: Family) -> Any:
    chat = fam.chat
    loaded: Any = LoadedModel.__new__(LoadedModel)
    for name, value in (
        ("tokenizer", chat.tokenizer),
        ("vocab_size", chat.vocab_size),
        ("eos_ids", fam.end_ids),
    ):
        object.__setattr__(loaded, name, value)
    return tokens_of(loaded)


def takes(fam: Family, ids: list[int], names: list[str] = NAMES) -> bool:
    """Whether an output, with its end, is one that the grammar allows."""
    from llguidance import LLMatcher

    tag = fam.chat.text_or_calls(fam.chat.render(ASK, None), TEXT, names)
    assert tag is not None
    matcher = LLMatcher(vocabulary(fam), LLMatcher.grammar_from_lark(lark_of(tag)), log_level=0)
    for token in ids[:-1]:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if not np.unpackbits(bits, bitorder="little")[token]:
            return False
        matcher.consume_token(token)
    return bool(matcher.is_accepting())


@pytest.mark.parametrize(("name", "thinking"), FAMILIES)
def test_the_grammar_takes_a_familys_own_answers_alone(name: str, thinking: bool) -> None:
    fam = family(name, thinking=thinking)
    # Where the prompt opens reasoning, it is free; else there is none.
    opened = fam.chat.ends_in_reasoning(fam.chat.render(ASK, None))
    thought = {"reasoning": 'Let me see: {"y"} <'} if opened else {}
    one, other = Call("add", {"a": "x < {1}\ny"}), Call("find", {"b": "z"})
    # DeepSeek writes a line break between two; gpt-oss puts an analysis before all.
    for each in [(one,), (one, other)][: {"deepseek": 1, "deepseek_r1": 1, "gpt_oss": 0}.get(name)]:
        said = fam.say(calls=each, **thought)
        assert takes(fam, said)
        assert not takes(fam, said, ["other"])
        assert not takes(fam, said[: len(said) // 2 + 1])
    if name != "gpt_oss":
        assert takes(fam, fam.say('{"x": 1}', **thought))
        assert not takes(fam, fam.say('{"x": 2}', **thought))
        assert not takes(fam, fam.say("text", **thought))


def test_gpt_oss_says_where_its_text_belongs() -> None:
    fam = family("gpt_oss")
    end = [min(fam.end_ids)]
    for text in (
        '<|channel|>final<|message|>{"x": 1}',
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": [1]}',
    ):
        assert takes(fam, fam.chat.encode(text, special=False) + end)
    assert not takes(fam, fam.chat.encode("<|channel|>analysis<|message|>x", special=False) + end)


@pytest.mark.parametrize("name", ["llama3", "unknown_plain"])
def test_families_whose_calls_cannot_be_told_from_text_have_no_grammar(name: str) -> None:
    fam = family(name)
    assert fam.chat.text_or_calls(fam.chat.render(ASK, None), TEXT, NAMES) is None
