"""How an agent that knows nothing of any-agent is told where its model is."""

from __future__ import annotations

import os

PLACEHOLDER_KEY = "any-agent-placeholder"
"""No key: OpenAI's clients refuse to be made without one, also where the URL names the session."""


def require_some_key() -> None:
    """Set this process's OPENAI_API_KEY to the placeholder, unless it is set."""
    if not os.environ.get("OPENAI_API_KEY"):
        os.environ["OPENAI_API_KEY"] = PLACEHOLDER_KEY


def environment(url: str, api_key: str) -> dict[str, str]:
    """The variables by which OpenAI's and Anthropic's clients find the service; ``url`` is without
    `/v1`, and may name the session."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": api_key,
        # A person's own would be sent beside the key, to us.
        "ANTHROPIC_AUTH_TOKEN": api_key,
    }
