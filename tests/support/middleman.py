"""A proxy in front of a real engine, or service, that changes what is asked or answered.

Headers of answers do not get through.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from any_agent.protocol.rl import API_HEADER

Change = Callable[[dict[str, Any]], None]


def nothing(_: dict[str, Any]) -> None: ...


@asynccontextmanager
async def between(
    engine: str, *, asked: Change = nothing, answered: Change = nothing
) -> AsyncIterator[str]:
    """Its URL; ``asked`` changes bodies of model calls, ``answered`` every answer in JSON."""
    http = aiohttp.ClientSession()

    async def forward(request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        stream = False
        if request.path in ("/generate", "/v1/chat/completions"):
            body = orjson.loads(raw)
            asked(body)
            raw, stream = orjson.dumps(body), body.get("stream") is True
        url = f"{engine}{request.path}"
        kept = ("Authorization", "Content-Type", "Idempotency-Key")
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        async with http.request(request.method, url, data=raw, headers=headers) as response:
            if stream:
                out = web.StreamResponse(status=response.status)
                await out.prepare(request)
                async for block in response.content.iter_any():
                    await out.write(block)
                return out
            content = await response.read()
            if response.status == 200 and content.startswith(b"{"):
                answer = orjson.loads(content)
                answered(answer)
                content = orjson.dumps(answer)
            # Of all that a service tells in headers only what clients must see to talk to it.
            told = {n: v for n, v in response.headers.items() if n.lower() == API_HEADER}
            return web.Response(
                body=content,
                status=response.status,
                headers=told,
                content_type="application/json",
            )

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await http.close()
        await runner.cleanup()
