"""Clients of other libraries that make their calls in a session. Imported where they are used."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from any_agent.client.aiohttp_transport import tls_context
from any_agent.errors import ConfigError

if TYPE_CHECKING:
    import anthropic
    import openai

_RETRIES = 10
"""A full engine or a restarted rank asks for patience, and a call that is sent again is marked: it
is not sampled twice."""


def openai_async(url: str, api_key: str, options: dict[str, Any]) -> openai.AsyncOpenAI:
    module = _openai()
    _own_connections(options, module.DefaultAsyncHttpxClient)
    client: openai.AsyncOpenAI = module.AsyncOpenAI(**_openai_options(url, api_key, options))
    return client


def openai_sync(url: str, api_key: str, options: dict[str, Any]) -> openai.OpenAI:
    module = _openai()
    _own_connections(options, module.DefaultHttpxClient)
    client: openai.OpenAI = module.OpenAI(**_openai_options(url, api_key, options))
    return client


def anthropic_async(url: str, api_key: str, options: dict[str, Any]) -> anthropic.AsyncAnthropic:
    module = _anthropic()
    _own_connections(options, module.DefaultAsyncHttpxClient)
    client: anthropic.AsyncAnthropic = module.AsyncAnthropic(
        **_anthropic_options(url, api_key, options)
    )
    return client


def anthropic_sync(url: str, api_key: str, options: dict[str, Any]) -> anthropic.Anthropic:
    module = _anthropic()
    _own_connections(options, module.DefaultHttpxClient)
    client: anthropic.Anthropic = module.Anthropic(**_anthropic_options(url, api_key, options))
    return client


def _openai_options(url: str, api_key: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"max_retries": _RETRIES, **options, "base_url": f"{url}/v1", "api_key": api_key}


def _anthropic_options(url: str, api_key: str, options: dict[str, Any]) -> dict[str, Any]:
    return {"max_retries": _RETRIES, **options, "base_url": url, "api_key": api_key}


def _own_connections(options: dict[str, Any], make: Any) -> None:
    """With the certificates that are read already: a client of its own would read them again. It
    follows nobody elsewhere: what is said in a session is the service's."""
    if options.get("http_client") is None:
        options["http_client"] = make(verify=tls_context(), follow_redirects=False)


def _openai() -> ModuleType:
    try:
        import openai
    except ImportError as error:
        raise _missing("openai") from error
    return openai


def _anthropic() -> ModuleType:
    try:
        import anthropic
    except ImportError as error:
        raise _missing("anthropic") from error
    return anthropic


def _missing(name: str) -> ConfigError:
    return ConfigError(f"{name} is not installed: pip install {name}")
