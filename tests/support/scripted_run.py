"""One generation of the scripted engine, and the ways in which it can fail."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from tests.support.true_logprobs import TrueModel

FaultKind = Literal[
    "die",
    "status",
    "error_event",
    "no_end",
    "nan",
    "null",
    "disagree",
    "garbage",
    "spans",
    "no_json",
    "unknown_id",
]
Plant = Literal[
    "truncates", "truncates_unsaid", "unscaled", "other_text", "stale_weights", "stale_version"
]
"""What is wrong with an engine: it drops the prompt's beginning (and says how much it read, or
not), gives log-probabilities without the temperature, decodes with another tokenizer, keeps its
weights at an update under the new version, or the version under new weights."""


def formula_logprob(token: int) -> float:
    """Return a token's log-probability where no model gives one."""
    return -0.5 - (token % 7) / 8


@dataclass(slots=True)
class Fault:
    kind: FaultKind
    after: int = 0
    """Tokens that come out before it."""
    status: int = 500


@dataclass(slots=True)
class Wait:
    """What a generation waits for: before one token for an event, or before each for a step."""

    at: int = -1
    event: asyncio.Event = field(default_factory=asyncio.Event)
    steps: asyncio.Semaphore | None = None


@dataclass(slots=True, eq=False)
class Running:
    rid: str
    prompt: list[int]
    params: dict[str, Any]
    script: list[int] | None
    fault: Fault | None
    wait: Wait | None = None
    prompt_tokens: int = 0
    """What it says that it read."""
    top: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    held: bool = False
    """It waits, or has waited, at a token of `hold`."""
    table: Tensor | None = None
    generation: int = -1
    """Of the weights that the table is of."""

    def planned(self, k: int) -> int:
        """The token at ``k``."""
        if self.script is not None:
            return self.script[k]
        # Of the whole context, so that a resumed request goes on as if it had not been cut.
        return 20 + (7 * (len(self.prompt) + k)) % 60

    def sample(self, version: str, model: TrueModel | None, *, scaled: bool = True) -> int:
        """The next token, with its log-probability and its likeliest rivals."""
        k = len(self.ids)
        token = self.planned(k)
        if model is None:
            logprob = formula_logprob(token)
            self.tops.append([(logprob - i / 4, token + i) for i in range(self.top)])
        else:
            row = self._row(model, k, scaled)
            logprob = row[token].item()
            values, tokens = row.topk(self.top)
            self.tops.append(list(zip(values.tolist(), tokens.tolist(), strict=True)))
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        return token

    def _row(self, model: TrueModel, k: int, scaled: bool) -> Tensor:
        if self.table is None or self.generation != model.generation:
            limit = int(self.params.get("max_new_tokens", 128))
            length = limit if self.script is None else min(limit, len(self.script))
            planned = [self.planned(i) for i in range(length)]
            self.table = model.logprobs(self.prompt, planned, self.params, scaled=scaled)
            self.generation = model.generation
        return self.table[k]

    def spans(self) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for k, version in enumerate(self.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = k + 1
            else:
                spans.append({"version": version, "start": k, "end": k + 1})
        return spans or [{"version": "0", "start": 0, "end": 0}]
