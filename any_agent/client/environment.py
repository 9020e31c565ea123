"""Environment variables by which OpenAI's and Anthropic's clients find the service."""

from __future__ import annotations

import os

from any_agent.keys import PLACEHOLDER_SESSION

PLACEHOLDER_KEY = "any-agent-placeholder"
"""A placeholder, since OpenAI's clients require a key even where the URL names the session."""


def require_some_key() -> None:
    """Set this process's OPENAI_API_KEY to the placeholder, unless it is set."""
    if not os.environ.get("OPENAI_API_KEY"):
        os.environ["OPENAI_API_KEY"] = PLACEHOLDER_KEY


def require_some_url(url: str) -> None:
    """Set this process's OPENAI_BASE_URL, unless it is set, to a path of the service at ``url``
    (without `/v1`) that refuses every call and explains what to do.

    With a key in OPENAI_API_KEY it stays unset: that key is for calls to OpenAI.
    """
    if os.environ.get("OPENAI_API_KEY", PLACEHOLDER_KEY) not in ("", PLACEHOLDER_KEY):
        return
    current = os.environ.get("OPENAI_BASE_URL")
    if not current or is_placeholder(current):
        os.environ["OPENAI_BASE_URL"] = f"{url}/{PLACEHOLDER_SESSION}/v1"


given_url = ""
"""The OPENAI_BASE_URL that :func:`require_service` has set."""


def require_service(url: str) -> None:
    """Set this process's OPENAI_BASE_URL and OPENAI_API_KEY to the service at ``url`` (without
    `/v1`) and a placeholder where neither is set: a client made without arguments would send an
    agent's prompts to OpenAI."""
    global given_url
    require_some_key()
    current = os.environ.get("OPENAI_BASE_URL", "")
    if os.environ["OPENAI_API_KEY"] == PLACEHOLDER_KEY and current in ("", given_url):
        os.environ["OPENAI_BASE_URL"] = given_url = f"{url}/v1"


def is_placeholder(url: str) -> bool:
    """Return True for a URL that :func:`require_some_url` has set."""
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
