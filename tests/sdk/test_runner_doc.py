"""The block of docs/how-to/agent-runner.md runs as it is written."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from tests.support.sdk_fixtures import Serve

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "agent-runner.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


async def test_the_agent_of_the_documented_page_runs(
    serve: Serve,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (block,) = BLOCKS
    served = await serve("sampling.max_new_tokens=4")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{served.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", served.tenant_key)
    item = {"question": "Say a number.", "answer": "seven"}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(item)}\n" * 2)
    code = compile(block, str(PAGE), "exec")
    for _ in range(2):
        # As a program, without its process: that would take longer than what it does.
        await asyncio.to_thread(exec, code, {"__name__": "__main__"})
        assert capsys.readouterr().out == "16 runs: 16 ok; mean reward 0\n"
    lines = [line async for line in served.proxy.client.sessions()]
    assert [(line.state, line.interactions) for line in lines] == [("finalized", 1)] * 16
