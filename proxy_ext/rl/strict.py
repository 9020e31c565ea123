"""Bodies of the `/rl` routes are read as those of model calls are: strictly, and not too deep.

The standard library's reader, FastAPI's choice, takes NaN, Infinity, 1e400 and lone surrogates, and
says of deep nesting that it is no JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from any_agent.errors import InvalidRequest
from proxy_ext.wire.http import read_json


class _StrictRequest(Request):
    async def json(self) -> Any:
        await read_json(self)
        # Which makes integers of more than 64 bits floats: no store and no wire of ours holds them.
        return json.loads(await self.body(), parse_int=_integer)


def _integer(digits: str) -> int:
    # Longer ones are not even read: that takes time.
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**63:
        raise InvalidRequest(
            "the body holds an integer of more than 64 bits; write it as text",
            code="integer_too_large",
        )
    return number


class StrictRoute(APIRoute):
    """A route whose body is JSON as the standard has it; InvalidRequest for anything else."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict
