"""The formats of an export, by name; their descriptions are in :mod:`any_agent.cli.export`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from proxy_ext.export.choice import Pair
from proxy_ext.export.fine_tuning import openai_chat, openai_preference, prompt_completion
from proxy_ext.export.preferences import Conversation, preference
from proxy_ext.export.reader import Credited
from proxy_ext.export.trajectories import NemoGymRollouts, atif

Lines = Callable[[Mapping[str, Any], Credited], Iterator[dict[str, Any]]]
"""A function of a session's row and its calls, which yields its lines."""
PairLine = Callable[[Pair, Conversation, Conversation, Mapping[str, Any]], dict[str, Any]]
"""A function of a pair, the better and the worse conversation, and a session's row, which returns
the pair's line."""


class Format(NamedTuple):
    """Which sessions a format takes, and what it writes of them: a style's rows, its own lines, or
    a line for each pair; else whole sessions."""

    takes: Literal["all", "best", "pairs"]
    style: str | None = None
    """The style of the rows, by default; None for a format without styles, and for whole
    sessions."""
    lines: Callable[[], Lines] | None = None
    """Return the function of one export."""
    pair: PairLine | None = None
    spans: bool = False
    """True for the spans of whole sessions."""


FORMATS: dict[str, Format] = {
    "jsonl": Format("all"),
    "parquet": Format("all", style="individual"),
    "hf": Format("all", style="individual"),
    "sft": Format("best", style="concat"),
    "prompt-completion": Format("best", lines=lambda: prompt_completion),
    "preferences": Format("pairs", pair=preference),
    "openai-chat": Format("best", lines=lambda: openai_chat),
    "openai-preferences": Format("pairs", pair=openai_preference),
    "atif": Format("all", lines=lambda: atif),
    "nemo-gym": Format("all", lines=lambda: NemoGymRollouts().lines),
    "otel": Format("all", spans=True),
}
