"""`/v1/models`: the policy, and the frozen models beside it."""

from __future__ import annotations

from typing import Any

from any_agent.errors import NotFound
from proxy_ext.service import RankService


def list_models(service: RankService) -> dict[str, Any]:
    """All that there are, in OpenAI's form, the policy first."""
    return {"object": "list", "data": _all(service)}


def one_model(service: RankService, name: str) -> dict[str, Any]:
    """One of them, by its name; NotFound for another one, though calls may name any."""
    policy, *frozen = _all(service)
    for model in (policy, *frozen):
        if model["id"] == name:
            return model
    others = "".join(f", {model['id']!a}" for model in frozen[:8])
    raise NotFound(
        f"there is no model {name[:80]!a}; the policy is called {policy['id']!a}"
        + (f", and there are{others[1:]}" if others else ""),
        code="model_not_found",
        param="model",
    )


def _all(service: RankService) -> list[dict[str, Any]]:
    policy = {
        "id": service.config.model.name,
        "object": "model",
        "created": 0,
        "owned_by": "any-agent",
        "context_length": service.completer.context_length,
    }
    return [policy, *(_frozen(name) for name in service.frozen.names)]


def _frozen(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "frozen"}
