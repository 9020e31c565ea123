"""Environment variables by which OpenAI's and Anthropic's clients find the service."""

from __future__ import annotations

import os

from any_agent.keys import PLACEHOLDER_SESSION

PLACEHOLDER_KEY = "any-agent-placeholder"
"""A placeholder, since OpenAI's clients require a key even where the URL names the session."""


def require_service(url: str) -> None:
    """Let this process's clients that are made without arguments find the service at ``url``
    (without `/v1`), unless OPENAI_API_KEY or OPENAI_BASE_URL is set.

    Such a client would fail for want of a key, or send an agent's prompts to OpenAI. The URL names
    no session: calls inside a session of the SDK join that one, and the service refuses all others,
    also those under a key of another provider, with what to do.
    """
    key = os.environ.get("OPENAI_API_KEY")
    if not key:
        os.environ["OPENAI_API_KEY"] = PLACEHOLDER_KEY
    # Another key is for calls to OpenAI.
    if (key or PLACEHOLDER_KEY) == PLACEHOLDER_KEY:
        current = os.environ.get("OPENAI_BASE_URL")
        if not current or is_placeholder(current):
            os.environ["OPENAI_BASE_URL"] = f"{url}/{PLACEHOLDER_SESSION}/v1"


def is_placeholder(url: str) -> bool:
    """Return True for a URL that :func:`require_service` has set."""
    return url.endswith(f"/{PLACEHOLDER_SESSION}/v1")


def environment(url: str, api_key: str) -> dict[str, str]:
    """Return the variables by which OpenAI's and Anthropic's clients find the service.

    ``url`` is without `/v1`, and may name the session.
    """
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": api_key,
        # Otherwise a user's own token would be sent to the service beside the key.
        "ANTHROPIC_AUTH_TOKEN": api_key,
    }
