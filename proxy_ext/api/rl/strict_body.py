"""Requests of the `/rl` routes are read as model calls are: strictly, and not too deep.

The standard library's reader, FastAPI's choice, takes NaN, Infinity, 1e400 and lone surrogates, and
says of deep nesting that it is no JSON. A query is read as a part of the body (`query.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from any_agent.errors import InvalidRequest
from proxy_ext.api.rl.dependencies import service_of
from proxy_ext.api.rl.query_fields import QueryFields, merged
from proxy_ext.web.exchange import read_json


class _StrictRequest(Request):
    async def json(self) -> Any:
        await read_json(self)
        # Which makes integers of more than 64 bits floats: no store and no wire of ours holds them.
        return json.loads(await self.body(), parse_int=_integer)

    async def take_in(self, said: dict[str, Any]) -> None:
        """Make what the query says a part of the body, for whoever reads either after this."""
        body = merged(await self.json() if await self.body() else {}, said)
        self._body = json.dumps(body).encode()
        # The scope itself, so that a request is known by what it asks for, wherever that stood.
        self.scope["query_string"] = b""

    def leave_out(self, name: str, query: str) -> None:
        """Take a field out of the query of a route whose own fields do not have it."""
        rest = [each for each in parse_qsl(query, keep_blank_values=True) if each[0] != name]
        self.scope["query_string"] = urlencode(rest).encode()


def _integer(digits: str) -> int:
    # Longer ones are not even read: that takes time.
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**63:
        raise InvalidRequest(
            "the body holds an integer of more than 64 bits; write it as text",
            code="integer_too_large",
        )
    return number


class StrictRoute(APIRoute):
    """A route whose body is JSON as the standard has it, whose query says what its body may.

    InvalidRequest for anything else.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        fields = QueryFields(self.dependant)

        async def strict(request: Request) -> Response:
            request = _StrictRequest(request.scope, request.receive)
            if query := request.scope["query_string"].decode("latin-1"):
                said = await fields.said(query, request.path_params)
                if not fields.takes_session and "session_id" in said:
                    auth = service_of(request).auth
                    await auth.require_same(request, said.pop("session_id"))
                    if fields.in_query:
                        request.leave_out("session_id", query)
                if fields.in_body:
                    await request.take_in(said)
            return await handle(request)

        return strict
