"""What a row of the table of parameters is, and what the rows of all routes have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from any_agent.completions.params.schema_check import Schema
from any_agent.completions.untrainable import UntrainableReason

Class: TypeAlias = Literal["honoured", "harmless", "refused"]
Api: TypeAlias = Literal["chat", "completions", "responses", "messages"]
UnknownParameters: TypeAlias = Literal["record", "refuse"]
"""`server.unknown_parameters`: what becomes of names that no row has."""
APIS: tuple[Api, ...] = get_args(Api)
BOTH: tuple[Api, ...] = ("chat", "completions")
CHAT: tuple[Api, ...] = ("chat",)
COMPLETIONS: tuple[Api, ...] = ("completions",)
RESPONSES: tuple[Api, ...] = ("responses",)
MESSAGES: tuple[Api, ...] = ("messages",)

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
"""Of what is recorded without effect, and of template arguments."""
MAX_PROMPT_IDS = 1 << 21
MAX_INTEGER = 2**63 - 1
COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` at `/v1/completions`."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row: a top-level field of a request's body."""

    name: str
    kind: Class
    schema: Schema
    """What it may be beside null; of refused ones, what is the case anyway."""
    meaning: str
    """What it does; of refused ones, what to do instead."""
    apis: tuple[Api, ...] = BOTH
    train: str = ""
    """What else holds in train sessions."""
    untrainable: UntrainableReason | None = None
    """What it makes an interaction whose answer it bends."""
    checked: bool = True
    """By the schema alone; if not, where it is read, because it has parts to be named."""
    details: Schema = field(default_factory=dict)
    """Of refused ones, more for the error: what tells an SDK to do without."""


INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string", "maxLength": 512}
TOKENS: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER}
NOTE: Schema = {"type": "object", "x-max-bytes": MAX_NOTE_BYTES}
OBJECTS: Schema = {"type": "array", "items": {"type": "object"}}
OVERRIDDEN = "The run's is used instead."


def penalty(name: str, low: float, high: float, meaning: str, neutral: float) -> Parameter:
    bounds = {"minimum": low} if neutral == 0 else {"exclusiveMinimum": low}
    schema = {"type": "number", **bounds, "maximum": high}
    return Parameter(name, "honoured", schema, meaning, untrainable="penalty")


def only(name: str, *values: Any, then: str, apis: tuple[Api, ...] = BOTH) -> Parameter:
    """Refused, unless it is one of these values."""
    return Parameter(name, "refused", {"enum": list(values)}, then, apis)


def never(
    name: str, then: str, apis: tuple[Api, ...] = BOTH, *, details: Schema | None = None
) -> Parameter:
    return Parameter(name, "refused", {"type": "null"}, then, apis, details=details or {})
