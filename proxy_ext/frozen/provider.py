"""What reaches the frozen models; `proxy_ext.litellm_shim` is the one that does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

FrozenApi: TypeAlias = str
"""The name of an API, see `any_agent.completions.apis`."""
Event: TypeAlias = dict[str, Any]
"""Of a stream: what stands behind `data:`."""


class Deployment(Protocol):
    """One place where a model is served."""

    @property
    def keeps_responses(self) -> bool:
        """Whether it speaks the Responses API itself, so that `previous_response_id` means
        something to it."""
        ...

    @property
    def priced(self) -> bool:
        """Whether it is known what its tokens cost."""
        ...

    async def whole(
        self, api: FrozenApi, params: Mapping[str, Any], *, within: float
    ) -> dict[str, Any]:
        """The answer's body. ProviderError, naming what is wrong."""
        ...

    def stream(
        self, api: FrozenApi, params: Mapping[str, Any], *, within: float
    ) -> AsyncGenerator[Event]:
        """The answer's events. ProviderError, also where one says so, and for a stream that ends
        before its end; closing it ends the call at the provider."""
        ...

    def cost(self, api: FrozenApi, usage: Mapping[str, Any]) -> float | None:
        """USD of a usage as the API tells it; None if that is not known."""
        ...

    def count(self, text: str) -> int:
        """About how many tokens a text has, for calls whose usage was never told."""
        ...


class Provider(Protocol):
    """All configured models."""

    @property
    def deployments(self) -> Mapping[str, Sequence[tuple[float, Deployment]]]:
        """By model: each with its weight."""
        ...

    async def close(self) -> None: ...
