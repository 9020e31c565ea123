"""The interface to the providers of frozen models; `proxy_ext.litellm_shim` implements it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

Event: TypeAlias = dict[str, Any]
"""The JSON behind `data:` of one event of a stream."""


class Deployment(Protocol):
    """One place where a model is served. ``api`` is a name of `any_agent.completions.apis`."""

    @property
    def keeps_responses(self) -> bool:
        """Return True for a provider of the Responses API, which knows `previous_response_id`."""
        ...

    @property
    def priced(self) -> bool:
        """Return True if the price of its tokens is known."""
        ...

    async def complete(self, api: str, params: Mapping[str, Any], within: float) -> dict[str, Any]:
        """Return the body of an answer in ``within`` seconds; ProviderError."""
        ...

    def stream(self, api: str, params: Mapping[str, Any], within: float) -> AsyncGenerator[Event]:
        """Yield the answer's events; closing the generator ends the call at the provider.

        ProviderError, also for an error event, and for a stream that breaks off before its end.
        """
        ...

    def cost(self, api: str, usage: Mapping[str, Any]) -> float | None:
        """Return the USD of a usage in the API's form; None if that is not known."""
        ...

    def count(self, text: str) -> int:
        """Return about how many tokens a text has, for a call without a reported usage."""
        ...


class Provider(Protocol):
    """All configured models."""

    @property
    def deployments(self) -> Mapping[str, Sequence[tuple[float, Deployment]]]:
        """Return the places of each model by its name, each with its weight."""
        ...

    async def close(self) -> None: ...
