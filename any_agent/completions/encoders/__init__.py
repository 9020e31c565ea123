"""Encoders of answers, whole and streaming, one API a file."""

from __future__ import annotations

from typing import Protocol

from any_agent.completions.call_types import Delta
from any_agent.errors import AnyAgentError
from any_agent.types import Interaction


class ResponseEncoder(Protocol):
    """Encodes one call's answer. Events are server-sent ones, with their blank lines."""

    def whole(self, answers: list[Interaction]) -> bytes:
        """Return the body of an answer that is not streamed, with all choices."""

    def start(self, index: int) -> bytes:
        """Return the first events of a choice, or nothing."""

    def delta(self, item: Delta) -> bytes:
        """Return the events of newly certain text, or nothing."""

    def end(self, index: int, interaction: Interaction) -> bytes:
        """Return the events that end a choice, or nothing."""

    def last(self, answers: list[Interaction]) -> bytes:
        """Return the events that end the stream once all choices have ended."""

    def failed(self, error: AnyAgentError) -> bytes:
        """Return the events that end a stream which has begun and cannot go on."""
