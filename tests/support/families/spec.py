"""What sets one family apart, and an answer before it has a family's form."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call; ``arguments`` as text is written as it is, so that it may be broken."""

    name: str
    arguments: dict[str, Any] | str = field(default_factory=dict)

    def json(self) -> str:
        if isinstance(self.arguments, str):
            return self.arguments
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model means to say."""

    text: str = ""
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Spec:
    """A family: its special tokens, its template, and how its models write an answer."""

    model_type: str
    """In config.json, where a loader looks for the family."""
    renderer: str
    """The family's renderer of PyPI's ``renderers``; ``default`` where none fits."""
    specials: tuple[str, ...]
    ends: tuple[str, ...]
    """Its end tokens; the first ends an answer in text."""
    template: str
    write: Callable[[Answer, bool], str]
    """An answer (and whether thinking is on) as sampled, with its end token."""
    past_end: str | None = None
    """How its template ends an earlier answer, where no answer ends so."""
    stop_ids: tuple[str, ...] = ()
    """Of generation_config.json, where it lists more than the ends."""
    thinks: bool = False
    """Its outputs may have reasoning, if thinking is on."""
    calls: int = 8
    """How many tool calls an answer may have; 0: the family has none."""
    enable_thinking: bool = False
    """Its template takes ``enable_thinking``."""
    bare_values: bool = False
    """Its calls' values have no quotes: only a tool's schema tells "7" from 7."""
    bos: str | None = None
