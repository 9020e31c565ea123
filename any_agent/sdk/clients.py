"""OpenAI's and Anthropic's clients whose calls are a session's; their packages are optional."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, TypeAlias

from any_agent.client.aiohttp_transport import tls_context
from any_agent.errors import ConfigError

_MAX_RETRIES = 10
"""A full engine or a restarted rank answers that a call is to be repeated, and repeated calls are
marked: they are not sampled twice."""

Kind: TypeAlias = Literal["", "Async"]


def openai_client(kind: Kind, url: str, api_key: str, options: dict[str, Any]) -> Any:
    """Return an ``OpenAI`` or ``AsyncOpenAI``; ConfigError if openai is not installed."""
    return _client("openai", f"{kind}OpenAI", kind, f"{url}/v1", api_key, options)


def anthropic_client(kind: Kind, url: str, api_key: str, options: dict[str, Any]) -> Any:
    """Return an ``Anthropic`` or ``AsyncAnthropic``; ConfigError if anthropic is not installed."""
    return _client("anthropic", f"{kind}Anthropic", kind, url, api_key, options)


def _client(
    package: str, name: str, kind: Kind, url: str, api_key: str, options: dict[str, Any]
) -> Any:
    try:
        module = import_module(package)
    except ImportError as error:
        raise ConfigError(f"{package} is not installed: pip install {package}") from error
    if options.get("http_client") is None:
        # With the process's certificates: a client of its own would read them again. It follows no
        # redirects: calls of a session are for the service alone.
        make = getattr(module, f"Default{kind}HttpxClient")
        options["http_client"] = make(verify=tls_context(), follow_redirects=False)
    options = {"max_retries": _MAX_RETRIES, **options, "base_url": url, "api_key": api_key}
    return getattr(module, name)(**options)
