"""`/v1/models`: the policy."""

from __future__ import annotations

from typing import Any

from any_agent.errors import NotFound
from proxy_ext.service import Service


def list_models(service: Service) -> dict[str, Any]:
    """All that there are, in OpenAI's form: the policy."""
    return {"object": "list", "data": [_policy(service)]}


def one_model(service: Service, name: str) -> dict[str, Any]:
    """The policy, by its name; NotFound for another one, though calls may name any."""
    policy = _policy(service)
    if name != policy["id"]:
        raise NotFound(
            f"there is no model {name[:80]!a}; the policy is called {policy['id']!a}",
            code="model_not_found",
            param="model",
        )
    return policy


def _policy(service: Service) -> dict[str, Any]:
    return {
        "id": service.config.model.name,
        "object": "model",
        "created": 0,
        "owned_by": "any-agent",
        "context_length": service.completer.context_length,
    }
