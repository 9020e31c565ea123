"""What stands for text in a grammar, of tokenizers of several kinds."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from any_agent.engine.embedded.grammar import GrammarCompiler, tokens_of
from any_agent.engine.embedded.model_loader import LoadedModel


def with_added(loaded: LoadedModel, *names: str, special: bool) -> LoadedModel:
    """Its markers, and these tokens too, are added ones that are special or not."""
    data = json.loads(loaded.tokenizer.backend_tokenizer.to_str())
    for one in data["added_tokens"]:
        one["special"] = special or one["id"] in loaded.eos_ids
    last = data["added_tokens"][-1]
    size = loaded.tokenizer.backend_tokenizer.get_vocab_size()
    data["added_tokens"] += [last | {"id": size + k, "content": n} for k, n in enumerate(names)]
    core = Tokenizer.from_str(json.dumps(data))
    eos = loaded.tokenizer.eos_token
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    return replace(loaded, tokenizer=tokenizer, vocab_size=size + len(names))


def spelled(loaded: LoadedModel, grammar: dict[str, Any]) -> list[int]:
    """The only text of a grammar, by the lowest id that is allowed at each place."""
    state = GrammarCompiler(loaded).compile(json.dumps(grammar))
    ids: list[int] = []
    for _ in range(100):
        token = int(np.flatnonzero(~state.forbidden())[0])
        state.push(token)
        assert state.error is None
        if state.ended:
            return ids
        ids.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", ["a<think>b", "<|im_end|>", "xyzyx", "</think></think>"])
def test_names_of_added_tokens_are_written_in_ordinary_tokens(
    loaded: LoadedModel, text: str, special: bool
) -> None:
    """Also where names overlap; and whether the tokenizer calls them special or not."""
    model = with_added(loaded, "xyz", "zyx", special=special)
    added = set(model.tokenizer.get_added_vocab().values())
    core = model.tokenizer.backend_tokenizer
    key = {"type": "object", "properties": {text: {"const": text}}, "required": [text]}
    for schema, value in (
        ({"const": text}, text),
        ({"enum": [text]}, text),
        (key | {"additionalProperties": False}, {text: text}),
    ):
        ids = spelled(model, {"json_schema": schema})
        assert not added & set(ids)
        assert json.loads(core.decode(ids, skip_special_tokens=False)) == value
    ids = spelled(model, {"regex": re.escape(text)})
    assert not added & set(ids)
    assert core.decode(ids, skip_special_tokens=False) == text


def test_text_without_names_is_encoded_as_ever_also_by_an_added_token_of_spaces(
    loaded: LoadedModel,
) -> None:
    text = 'the answer {"a": [1, 2]} größer 你好'
    core = loaded.tokenizer.backend_tokenizer
    assert tokens_of(loaded).tokenize_str(text) == core.encode(text, add_special_tokens=False).ids
    model = with_added(loaded, "        ", special=False)
    run = model.vocab_size - 1
    assert run in spelled(model, {"json_schema": {"const": "a        b"}})
