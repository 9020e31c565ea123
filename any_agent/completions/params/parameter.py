"""One row of the table of parameters, and the limits and schemas that rows share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from any_agent.completions.params.schema_check import Schema
from any_agent.completions.untrainable import UntrainableReason

Class: TypeAlias = Literal["honoured", "harmless", "refused"]
UnknownParameters: TypeAlias = Literal["record", "refuse"]
"""`server.unknown_parameters`: the treatment of names that no row has."""
BOTH = ("chat", "completions")
CHAT = ("chat",)
COMPLETIONS = ("completions",)
RESPONSES = ("responses",)
MESSAGES = ("messages",)

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 512
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 1 << 20
MAX_SCHEMA_BYTES = 1 << 17
MAX_SCHEMA_DEPTH = 32
MAX_NOTE_BYTES = 1 << 14
"""Bytes of JSON that are recorded without effect, or given to the chat template."""
MAX_PROMPT_IDS = 1 << 21
MAX_INTEGER = 2**63 - 1
COMPLETION_TOKENS = 16  # OpenAI's default of `max_tokens` at `/v1/completions`


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row: a top-level field of a request's body."""

    name: str
    kind: Class
    schema: Schema
    """The values that it may have beside null; of a refused one, the values that change nothing."""
    meaning: str
    """The effect; of a refused one, what to do instead."""
    apis: tuple[str, ...] = BOTH
    train: str = ""
    """The difference in train sessions."""
    untrainable: UntrainableReason | None = None
    """The reason why an interaction whose sampling it changes is untrainable."""
    checked: bool = True
    """True if the schema alone checks it; else its reader does, because errors name its parts."""
    details: Schema = field(default_factory=dict)
    """Further fields of the error of a refused one, so that an SDK can continue without it."""


INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string", "maxLength": 512}
TOKENS: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER}
NOTE: Schema = {"type": "object", "x-max-bytes": MAX_NOTE_BYTES}
OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
STOPS: Schema = {
    "type": "array",
    "maxItems": MAX_STOPS,
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
}
TOP_LOGPROBS: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_TOP_LOGPROBS}
OVERRIDDEN = "The run's is used instead."


def honoured(
    apis: tuple[str, ...], name: str, schema: Schema, meaning: str, **more: Any
) -> Parameter:
    """Return the row of a parameter that shapes the call."""
    return Parameter(name, "honoured", schema, meaning, apis, **more)


def harmless(apis: tuple[str, ...], *rows: tuple[str, Schema, str]) -> tuple[Parameter, ...]:
    """Return the rows of parameters that are recorded and change nothing: name, schema, meaning."""
    return tuple(Parameter(name, "harmless", schema, text, apis) for name, schema, text in rows)


def penalty(name: str, low: float, high: float, meaning: str, neutral: float) -> Parameter:
    """Return the row of a penalty; ``neutral``: the value that changes nothing."""
    bounds = {"minimum": low} if neutral == 0 else {"exclusiveMinimum": low}
    schema = {"type": "number", **bounds, "maximum": high}
    return Parameter(name, "honoured", schema, meaning, untrainable="penalty")


def only(name: str, *values: Any, then: str, apis: tuple[str, ...] = BOTH) -> Parameter:
    """Return the row of a parameter that is refused unless it has one of these values."""
    return Parameter(name, "refused", {"enum": list(values)}, then, apis)


def never(
    name: str, then: str, apis: tuple[str, ...] = BOTH, *, details: Schema | None = None
) -> Parameter:
    """Return the row of a parameter that is always refused."""
    return Parameter(name, "refused", {"type": "null"}, then, apis, details=details or {})
