"""`/v1/models`: the policy."""

from __future__ import annotations

from typing import Any

from proxy_ext.service import Service


def list_models(service: Service) -> dict[str, Any]:
    """The policy's name and its context length, in OpenAI's form."""
    model = {
        "id": service.config.model.name,
        "object": "model",
        "created": 0,
        "owned_by": "any-agent",
        "context_length": service.completer.context_length,
    }
    return {"object": "list", "data": [model]}
