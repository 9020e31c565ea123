"""The obvious router: aiohttp on both sides, a client session for each request."""

from __future__ import annotations

import argparse
from pathlib import Path

import aiohttp
from aiohttp import web

from any_agent.keys import KeySigner
from any_agent.rundir.layout import RunDir

HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


class Obvious:
    """Check the session key like our router, and return its rank."""

    def __init__(self, ranks: list[str], signer: KeySigner) -> None:
        self._ranks = ranks
        self._signer = signer

    async def forward(self, request: web.Request) -> web.StreamResponse:
        lane = self._signer.verify(request.headers["authorization"].removeprefix("Bearer "))
        if lane is None:
            raise web.HTTPUnauthorized
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                request.method,
                f"{self._ranks[lane.rank]}{request.path_qs}",
                headers=headers,
                data=await request.read(),
            ) as answer,
        ):
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for block in answer.content.iter_any():
                await response.write(block)
        return response


async def healthz(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--ranks", nargs="+", required=True, help="the URL of each")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    router = Obvious(args.ranks, KeySigner(RunDir(args.run_dir).signing_secret()))
    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_route("*", "/{path:.*}", router.forward)
    web.run_app(app, host="127.0.0.1", port=args.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
