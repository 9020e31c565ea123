from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_SOURCE = """
import asyncio, logging
from any_agent.runtime.logs import set_up_logging
from proxy_ext import litellm_shim

set_up_logging("debug", "json", part="rank-0", secrets=["the-admin-key"])
app = litellm_shim.load_app()

async def main():
    async with litellm_shim.lifespan(app):
        for name in ("LiteLLM", "LiteLLM Proxy", "LiteLLM Router"):
            logging.getLogger(name).error("got sk-12345678 and the-admin-key")

asyncio.run(main())
"""


@pytest.mark.service
def test_log_lines_of_litellm_take_our_form_without_keys() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SOURCE],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    said = [line["logger"] for line in lines if line["message"] == "got sk-*** and ***"]
    assert said == ["LiteLLM", "LiteLLM Proxy", "LiteLLM Router"]
