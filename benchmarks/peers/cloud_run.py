"""A run of the cloud's benchmark: the ranks of `upstream.py`, started as a run's service is."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import uvloop
import yaml
from upstream import Upstream

from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import RegistryEntry, publish
from any_agent.runtime.ports import accept_on, reserve


async def serve(settings: dict[str, Any]) -> None:
    names = (settings["user"], settings["experiment"], settings["trial"])
    run = RunDir.of(Path(settings["root"]), *names)
    run.signing_secret()
    listener = reserve(settings["server"]["host"], settings["server"]["port"])
    accept_on(listener, 2048)
    await asyncio.get_running_loop().create_server(Upstream, sock=listener)
    run.registry.mkdir(exist_ok=True, mode=0o700)
    publish(run.registry, RegistryEntry(name="trainer", boot_id="b", url="", pid=os.getpid()))
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(yaml.safe_load(Path(sys.argv[-1]).read_text())))
