"""A script that extends LiteLLM's own app, serves it, and takes one episode from it:
``python -m tests.support.extended_app CONFIG ENGINE_URL PORT EPISODE``."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from pathlib import Path

import uvicorn
from litellm.proxy.proxy_server import app

from any_agent import ModelRequest, ProxyWorkflow
from any_agent.config import load_resolved
from any_agent.errors import AnyAgentError, ConfigError
from proxy_ext.extend import extend


async def take(path: Path, refusals: dict[str, str]) -> None:
    (trajectory,) = await ProxyWorkflow(app).arun_episode(app.engine, None)
    said = await app.engine.agenerate(ModelRequest(input_ids=[1, 2, 3]))
    episode = {
        "refusals": refusals,
        "session_id": trajectory.session_id,
        "final_reward": trajectory.final_reward,
        "completions": [list(map(int, i.output_ids)) for i in trajectory.interactions],
        "engine_answers": len(said.output_tokens),
        "left_in_the_cache": list(app.session_cache),
    }
    path.with_suffix(".part").write_text(json.dumps(episode))
    path.with_suffix(".part").rename(path)


def refusal_of(attempt: object) -> str:
    try:
        attempt()  # type: ignore[operator]
    except AnyAgentError as error:
        return f"{type(error).__name__}: {error.message}"
    return "none"


if __name__ == "__main__":
    config, engine_url, port, path = sys.argv[1:]
    settings = load_resolved(config)
    parts = {"engine_url": engine_url, "public_url": f"http://127.0.0.1:{port}"}
    extend(app, settings, **parts)  # type: ignore[arg-type]
    request = ModelRequest(input_ids=[1])
    refusals = {
        "before the start": refusal_of(lambda: asyncio.run(app.engine.agenerate(request))),
        "a second time": refusal_of(lambda: extend(app, settings, **parts)),  # type: ignore[arg-type]
        "another app": refusal_of(lambda: extend(object(), settings, **parts)),  # type: ignore[arg-type]
    }
    assert ConfigError.__name__ in refusals["another app"]
    server = uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "uvicorn ended"
        time.sleep(0.1)
    asyncio.run(take(Path(path), refusals))
    thread.join()
