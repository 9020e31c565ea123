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

from proxy_ext.wire.http import read_json


class _StrictRequest(Request):
    async def json(self) -> Any:
        await read_json(self)
        # Which makes integers of more than 64 bits floats: whoever must not take them shall know.
        return json.loads(await self.body())


class StrictRoute(APIRoute):
    """A route whose body is JSON as the standard has it; InvalidRequest for anything else."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strict
