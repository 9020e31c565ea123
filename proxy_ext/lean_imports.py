"""Imports of a rank that leave out what no rank uses: seconds of its start, and 200 MiB.

Of transformers a rank uses tokenizers, which need no torch, but transformers imports torch where
it is installed; of renderers it uses all but the client, which imports openai.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_QUIET = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def import_lean() -> None:
    """Import transformers and renderers; what was imported before stays as it is.

    Afterwards torch and openai are imported by whoever asks for them, as ever; transformers itself
    goes on without torch for this process's life.
    """
    if "transformers" not in sys.modules:
        with _instead("torch", None), _quiet():
            from transformers.utils import is_torch_available

            # It is asked once and remembered.
            is_torch_available()
    stand_in = ModuleType("openai")
    stand_in.AsyncOpenAI = object  # type: ignore[attr-defined]
    with _instead("openai", stand_in):
        import renderers  # noqa: F401


@contextmanager
def _instead(name: str, module: ModuleType | None) -> Iterator[None]:
    """What an import of ``name`` finds meanwhile, unless it is there already; None: nothing."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' advice to install torch."""
    before = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_QUIET]
        else:
            os.environ[_QUIET] = before
