"""Miniature model folders, one per family of chat formats that people train.

``family("glm")`` makes a folder in Hugging Face's layout: a small byte-level BPE with the
family's special tokens, a chat template with the family's structure, its config's model type
and its end tokens. ``say`` writes an answer as a model of the family would sample it.
"""

from __future__ import annotations

from tests.support.families.family import Family, family, names
from tests.support.families.spec import Answer, Call

__all__ = ["Answer", "Call", "Family", "family", "names"]
