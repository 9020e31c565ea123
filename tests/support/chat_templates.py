"""Chat formats of a template, or of a tokenizer, of one's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from any_agent.chat import ChatFormat, load_chat_format
from tests.support.families import family


def model_with(path: Path, template: str | None, source: Path | None = None) -> str:
    """A copy of a model (Qwen3's miniature) without weights, with this template or with none."""
    source = source or family("qwen3").model_dir
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors"))
    jinja = path / "chat_template.jinja"
    if template is None:
        jinja.unlink()
    else:
        jinja.write_text(template)
    return str(path)


def with_template(path: Path, template: str, **options: Any) -> ChatFormat:
    """The format of that copy."""
    return load_chat_format(model_with(path, template), **options)


def sentencepiece_like(path: Path, scheme: str, template: str) -> ChatFormat:
    """A tokenizer that puts a space before words at a text's start, or after every token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = (
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:?!/|<>_▁\n'\"{}[]()é"
    )
    tokens = [*letters, "<s>", "</s>", "[INST]", "[/INST]", "<unk>", *(f"▁{c}" for c in "abcd")]
    vocab = {token: n for n, token in enumerate(tokens)}
    merges = [("▁", c) for c in "abcd"]
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, additional_special_tokens=["[INST]", "[/INST]"], **special
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    return load_chat_format(str(path), enable_thinking=None)
