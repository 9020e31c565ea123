"""The families that the laws are tried on."""

from __future__ import annotations

FAMILIES = [
    ("qwen3", False),
    ("qwen3", True),
    ("qwen3_5", True),
    ("llama3", False),
    ("glm", False),
    ("glm", True),
    ("deepseek", False),
    ("deepseek_r1", False),
    ("gpt_oss", False),
    ("unknown", False),
    ("unknown_plain", False),
]
"""Names, and whether thinking is switched on."""


def label(case: tuple[str, bool]) -> str:
    name, thinking = case
    return f"{name}-thinking" if thinking else name
