"""How a process that knows nothing of any-agent is told where its model is."""

from __future__ import annotations


def environment(url: str, api_key: str) -> dict[str, str]:
    """The variables by which OpenAI's and Anthropic's clients find the service."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": api_key,
        # A person's own would be sent beside the key, to us.
        "ANTHROPIC_AUTH_TOKEN": api_key,
    }
