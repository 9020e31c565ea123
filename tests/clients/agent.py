"""One session of an agent that uses a client: all it knows is a URL and a key."""

from __future__ import annotations

from typing import Any

from tests.clients.client import Running
from tests.clients.live import Live

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
"""What the model writes to call the tool that every agent has here."""
TURNS = ["5.", "6, I say.", "7"]


class Agent:
    """Called with a step's name, and what the step takes, it takes that step."""

    def __init__(self, live: Live, running: Running) -> None:
        live.engine.hush()
        self._live = live
        self._running = running
        self._key = live.open()["api_key"]
        self._before = live.continued()

    def __call__(self, step: str, *given: str) -> dict[str, Any]:
        variables = {
            "OPENAI_BASE_URL": f"{self._live.url}/v1",
            "OPENAI_API_KEY": self._key,
            "ANTHROPIC_BASE_URL": self._live.url,
            "ANTHROPIC_API_KEY": self._key,
        }
        return self._running.step(step, given, variables)

    @property
    def recorded(self) -> dict[str, int]:
        """Its interactions, by how their prompts came about."""
        return dict(self._live.continued() - self._before)
