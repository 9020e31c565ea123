"""`/v1/embeddings`: of frozen models alone."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from any_agent.completions.asked import Asked
from any_agent.errors import NotFound
from proxy_ext.service import Service
from proxy_ext.wire.serve import Asking, serve


async def embeddings(service: Service, request: Request) -> Response:
    """Texts as vectors, by a model of `frozen.model_list`."""
    return await serve(service, request, _of_the_policy)


def _of_the_policy(asking: Asking) -> Asked:
    name = asking.body.get("model") if isinstance(asking.body, dict) else None
    named = f"{str(name)[:80]!a} is none of them" if name is not None else "the body names none"
    raise NotFound(
        "the policy makes no embeddings, the models of the service's frozen.model_list do, and "
        + named,
        code="model_not_found",
        param="model",
    )
