"""The smallest recording gateway in Python, and the smallest relay."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    app = FastAPI()
    records: list[Any] = []
    upstream: list[aiohttp.ClientSession] = []
    url = f"{args.engine_url}/v1/chat/completions"

    async def post(body: bytes) -> aiohttp.ClientResponse:
        if not upstream:
            upstream.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        headers = {"content-type": "application/json"}
        return await upstream[0].post(url, data=body, headers=headers)

    async def blocks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        async with response:
            async for block in response.content.iter_any():
                yield block

    async def recorded(response: aiohttp.ClientResponse, asked: Any) -> AsyncIterator[bytes]:
        events: list[Any] = []
        async for block in blocks(response):
            for event in block.split(b"\n\n"):
                if event.startswith(b"data: {"):
                    events.append(orjson.loads(event[6:]))  # noqa: PERF401
            yield block
        records.append((asked, events))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.body()
        asked = orjson.loads(body)
        response = await post(body)
        if asked.get("stream"):
            return StreamingResponse(recorded(response, asked), media_type="text/event-stream")
        async with response:
            answer = await response.read()
        records.append((asked, orjson.loads(answer)))
        return Response(answer, media_type="application/json")

    @app.post("/relay/v1/chat/completions")
    async def relay(request: Request) -> Response:
        response = await post(await request.body())
        return StreamingResponse(blocks(response), media_type=response.content_type)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    uvicorn.run(app, host="127.0.0.1", port=args.port, loop="uvloop", access_log=False)


if __name__ == "__main__":
    main()
