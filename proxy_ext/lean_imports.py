"""Imports of a rank without unused libraries, which would cost seconds at start and 200 MiB.

A rank uses the tokenizers of transformers, which need no torch, but transformers imports torch
where it is installed; it uses all of renderers but the client, which imports openai.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from any_agent.runtime.environment import environment_with

_QUIET = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
"""Silences transformers' advice to install torch."""


def import_lean() -> None:
    """Import transformers without torch, and renderers without openai.

    Modules that were imported before stay as they are. Other code can import torch and openai
    afterwards; transformers itself does without torch for the life of this process.
    """
    if "transformers" not in sys.modules:
        with _substitute("torch", None), environment_with(_QUIET):
            from transformers.utils import is_torch_available

            # transformers caches the answer.
            is_torch_available()
    stand_in = ModuleType("openai")
    stand_in.AsyncOpenAI = object  # type: ignore[attr-defined]
    with _substitute("openai", stand_in):
        import renderers  # noqa: F401


@contextmanager
def _substitute(name: str, module: ModuleType | None) -> Iterator[None]:
    """Let an import of ``name`` find ``module`` (None: fail) meanwhile, unless it is imported."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
