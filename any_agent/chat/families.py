"""The model families known by name: their model types and the tokens that end their turns.

To add a family, add its row here, write its output grammar in `output/grammars/<family>.py`, and
list that grammar in the tables of `output/grammars/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """One model family."""

    name: str
    """The name in PyPI's ``renderers``, by which the output grammar is chosen."""
    model_types: tuple[str, ...]
    """The values of ``model_type`` in config.json."""
    stops: tuple[str, ...]
    """Tokens that end a turn, besides those of generation_config.json; the usual one first."""


_QWEN = ("<|im_end|>", "<|endoftext|>")
FAMILIES = (
    Family("qwen3", ("qwen3", "qwen3_moe"), _QWEN),
    Family("qwen3.5", ("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN),
    Family("llama-3", ("llama",), ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")),
    Family("glm-4.5", ("glm4_moe",), ("<|user|>", "<|observation|>", "<|endoftext|>")),
    Family("deepseek-v3", ("deepseek_v3",), ("<｜end▁of▁sentence｜>",)),
    Family("gpt-oss", ("gpt_oss",), ("<|return|>", "<|call|>")),
    Family("minimax-m2", ("minimax_m2",), ()),
    Family("kimi-k2", ("kimi_k2",), ("<|im_end|>",)),
)
BY_NAME = {family.name: family for family in FAMILIES}
BY_MODEL_TYPE = {kind: family.name for family in FAMILIES for kind in family.model_types}
