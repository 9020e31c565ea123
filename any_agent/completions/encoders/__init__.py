"""What a call is answered with, whole and streaming: one shape a file."""

from __future__ import annotations

from typing import Protocol

from any_agent.completions.call_types import Delta
from any_agent.errors import AnyAgentError
from any_agent.types import Interaction


class ResponseEncoder(Protocol):
    """The shape of one call's answer. Events are server-sent ones, with their blank lines."""

    def whole(self, answers: list[Interaction]) -> bytes:
        """The body, of all choices."""

    def start(self, index: int) -> bytes:
        """The first events of a choice, or nothing."""

    def delta(self, item: Delta) -> bytes:
        """The events of newly certain text, or nothing."""

    def end(self, index: int, interaction: Interaction) -> bytes:
        """The events that end a choice, or nothing."""

    def last(self, answers: list[Interaction]) -> bytes:
        """What comes when all choices have ended, to the stream's end."""

    def failed(self, error: AnyAgentError) -> bytes:
        """What ends a stream that has begun and cannot go on."""
