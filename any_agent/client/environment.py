"""How an agent that knows nothing of any-agent is told where its model is."""

from __future__ import annotations

import os

from any_agent.keys import PLACEHOLDER_SESSION

PLACEHOLDER_KEY = "any-agent-placeholder"
"""No key: OpenAI's clients refuse to be made without one, also where the URL names the session."""


def require_some_key() -> None:
    """Set this process's OPENAI_API_KEY to the placeholder, unless it is set."""
    if not os.environ.get("OPENAI_API_KEY"):
        os.environ["OPENAI_API_KEY"] = PLACEHOLDER_KEY


def require_some_url(url: str) -> None:
    """Set this process's OPENAI_BASE_URL, unless it is set, to where the service of this ``url``
    (without `/v1`) refuses every call and says what to do.

    With a key in OPENAI_API_KEY it stays unset: calls to OpenAI under that key are meant.
    """
    if os.environ.get("OPENAI_API_KEY", PLACEHOLDER_KEY) not in ("", PLACEHOLDER_KEY):
        return
    there = os.environ.get("OPENAI_BASE_URL")
    if not there or is_placeholder(there):
        os.environ["OPENAI_BASE_URL"] = f"{url}/{PLACEHOLDER_SESSION}/v1"


def is_placeholder(url: str) -> bool:
    """Return whether it is the URL that :func:`require_some_url` sets."""
    return url.endswith(f"/{PLACEHOLDER_SESSION}/v1")


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
