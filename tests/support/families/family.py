"""A family's folder, its chat format, and answers in its form."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.families import deepseek, glm, gpt_oss, llama, qwen, unknown
from tests.support.families.spec import Answer, Call, Spec
from tests.support.families.vocabulary import make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from any_agent.chat import ChatFormat

_SPECS: dict[str, Spec] = {
    "qwen3": qwen.QWEN3,
    "qwen3_5": qwen.QWEN3_5,
    "llama3": llama.LLAMA3,
    "glm": glm.GLM,
    "deepseek": deepseek.V3,
    "deepseek_r1": deepseek.R1,
    "gpt_oss": gpt_oss.GPT_OSS,
    "unknown": unknown.WITH_TOOLS,
    "unknown_plain": unknown.WITHOUT_TOOLS,
}


def names() -> tuple[str, ...]:
    return tuple(_SPECS)


@cache
def family(name: str, *, thinking: bool = False) -> Family:
    """The miniature family of that name, made once in a process.

    ``thinking`` turns it on in the templates that have a switch for it (Qwen, GLM).
    """
    spec = _SPECS[name]
    return Family(name, spec, _folder(name), thinking and spec.enable_thinking)


@dataclass(frozen=True)
class Family:
    """One family; compared and hashed by what it was asked for."""

    name: str
    spec: Spec
    model_dir: Path
    """A folder without weights: see ``weights_dir``."""
    thinking: bool

    @property
    def reasons(self) -> bool:
        """Whether its answers may have reasoning."""
        return self.spec.thinks and (self.thinking or not self.spec.enable_thinking)

    @cached_property
    def chat(self) -> ChatFormat:
        """As the service loads it by default."""
        return self.load()

    @cached_property
    def end_ids(self) -> frozenset[int]:
        vocab = self.chat.tokenizer.get_vocab()
        return frozenset(vocab[end] for end in self.spec.ends)

    @cached_property
    def weights_dir(self) -> Path:
        """The same folder with random weights (of a tiny Qwen3: any model over this vocabulary
        serves a chat format)."""
        return _weights(self.name)

    def load(self, **options: Any) -> ChatFormat:
        """Its chat format with options of ``load_chat_format`` changed."""
        from any_agent.chat import load_chat_format

        thinking = self.thinking if self.spec.enable_thinking else None
        return load_chat_format(str(self.model_dir), **{"enable_thinking": thinking, **options})

    def say(
        self,
        text: str = "",
        *,
        reasoning: str | None = None,
        calls: tuple[Call, ...] = (),
        cut: int | None = None,
    ) -> list[int]:
        """An answer's ids as the model would sample them, with the end token.

        ``cut`` keeps so many leading ids: a truncated output.
        """
        if reasoning is not None and not self.reasons:
            raise ValueError(f"{self.name} has no reasoning here")
        if len(calls) > self.spec.calls:
            raise ValueError(f"{self.name} makes at most {self.spec.calls} calls")
        ids = self.encode(self.spec.write(Answer(text, reasoning, calls), self.thinking))
        return ids if cut is None else ids[:cut]

    def encode(self, text: str) -> list[int]:
        """With special tokens where they are spelled out."""
        return list(self.chat.tokenizer.encode(text, add_special_tokens=False))


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="families-")


@cache
def _folder(name: str) -> Path:
    spec = _SPECS[name]
    path = Path(_root().name) / name
    tokenizer = make_tokenizer(spec)
    _save(tokenizer, path)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in spec.stop_ids or spec.ends]
    config = {"model_type": spec.model_type, "vocab_size": len(tokenizer), "eos_token_id": ends}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return path


@cache
def _weights(name: str) -> Path:
    from any_agent.demo.models.tiny import make_model

    spec = _SPECS[name]
    tokenizer = make_tokenizer(spec)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in (spec.ends[0], spec.ends[-1])]
    model = make_model(len(tokenizer), 0, context=4096, eos_token_id=ends[0], pad_token_id=ends[1])
    path = Path(_root().name) / f"{name}-weights"
    model.save_pretrained(path)
    _save(tokenizer, path)
    return path


def _save(tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    tokenizer.save_pretrained(path)
    file = path / "tokenizer_config.json"
    # Else some model types bring an unknown token of their own, which is a token of ours.
    file.write_text(json.dumps({**json.loads(file.read_text()), "unk_token": None}))
