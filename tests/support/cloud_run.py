"""A run's service without a model, started as the cloud starts a real one: it answers what it got.

Files in its trial's folder change it: `fails` makes its start fail, `unready` keeps it from being
ready, `stays` keeps it from ending at SIGTERM. Each start adds a line to `starts`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from any_agent.auth.access import signer_of
from any_agent.auth.key_store import read_keys
from any_agent.keys import bearer_of
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import RegistryEntry, publish
from any_agent.runtime.ports import reserve


def main(path: str) -> None:
    settings = yaml.safe_load(Path(path).read_text())
    names = (settings["user"], settings["experiment"], settings["trial"])
    run = RunDir.of(Path(settings["root"]), *names)
    with open(run.path / "starts", "a") as starts:
        starts.write(f"{os.getpid()}\n")
    if (run.path / "fails").exists():
        sys.exit(3)
    asyncio.run(serve(settings, run))


async def serve(settings: dict[str, Any], run: RunDir) -> None:
    server = settings["server"]
    signer = signer_of(run, server["lane_tag"])
    calls: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/readyz":
            return web.Response(status=503 if (run.path / "unready").exists() else 200)
        key = bearer_of(request.headers.getall("Authorization", ()), ())
        known = read_keys(run.keys).find(key) or signer.verify(key)
        body = await request.read()
        if request.path.endswith("/slow"):
            await asyncio.sleep(1.0)
        calls.append(request.path_qs)
        made = {}
        if "start_session" in request.path:
            id = f"ses-0-{server['lane_tag']}{secrets.token_hex(8)}"
            made = {"api_key": signer.mint(0)[1], "session_id": id}
        return web.json_response(
            {
                "run": run.full_name,
                "path": request.path_qs,
                "method": request.method,
                "size": len(body),
                "known": known is not None,
                "calls": len(calls),
                **made,
            }
        )

    stop = asyncio.Event()
    if (run.path / "stays").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.SockSite(runner, reserve(server["host"], server["port"])).start()
    run.registry.mkdir(exist_ok=True, mode=0o700)
    publish(run.registry, RegistryEntry(name="trainer", boot_id="b", url="", pid=os.getpid()))
    await stop.wait()
    (run.registry / "trainer.json").unlink()
    await runner.cleanup()


if __name__ == "__main__":
    main(sys.argv[-1])
