"""`/v1/embeddings`: of frozen models alone."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from any_agent.completions.parsed_request import ParsedRequest
from any_agent.errors import InvalidRequest, NotFound
from proxy_ext.api.model_call import ModelCallContext, serve
from proxy_ext.service import RankService


async def embeddings(service: RankService, request: Request) -> Response:
    """Texts as vectors, by a model of `frozen.model_list`."""
    return await serve(service, request, _of_the_policy)


def _of_the_policy(asking: ModelCallContext) -> ParsedRequest:
    body = asking.body
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    name = body.get("model")
    if not isinstance(name, str):
        raise InvalidRequest(
            "model is required: the name of a model of the service's frozen.model_list",
            param="model",
        )
    raise NotFound(
        f"the policy makes no embeddings; models of the service's frozen.model_list do, and "
        f"{name[:80]!a} is none of them",
        code="model_not_found",
        param="model",
    )
