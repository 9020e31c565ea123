"""`any-agent` as it is typed, beside a service of the test's own process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import NamedTuple


class Said(NamedTuple):
    code: int
    out: str
    err: str


async def typed(*words: str, **environ: str) -> Said:
    """Give a command in an environment without settings; its exit code and what it said."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("ANY_AGENT")} | environ
    command = [sys.executable, "-m", "any_agent.cli", *words]
    done = await asyncio.to_thread(
        subprocess.run, command, env=env, capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Said(done.returncode, done.stdout, done.stderr)
