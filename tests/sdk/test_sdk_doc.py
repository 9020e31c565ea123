"""Every block of docs/how-to/sdk.md runs as it is written."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.support.sdk_fixtures import Served
from tests.support.trials import save_trial

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "sdk.md"
_NAMED = re.compile(r"^<!-- test: ([a-z-]+) -->\n```python\n(.*?)^```$", re.M | re.S)
BLOCKS: dict[str, str] = dict(_NAMED.findall(PAGE.read_text(encoding="utf-8")))
RUN = ("session", "ambient", "runner", "inference", "inference-blocking")


def test_every_code_block_of_the_sdk_page_has_a_test() -> None:
    assert tuple(BLOCKS) == RUN
    assert PAGE.read_text(encoding="utf-8").count("```") == 2 * len(RUN)


async def run(name: str) -> None:
    """As a program, without its process: that would take longer than what it does."""
    code = compile(BLOCKS[name], f"docs/how-to/sdk.md:{name}", "exec")
    await asyncio.to_thread(exec, code, {"__name__": "__main__"})


@pytest.mark.parametrize(("name", "sessions"), [("session", 1), ("ambient", 4), ("runner", 2)])
@pytest.mark.service
async def test_sessions_of_the_pages_examples_are_finalized_with_rewards(
    name: str, sessions: int, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    await run(name)
    lines = [line async for line in served.proxy.client.sessions()]
    assert [line.state for line in lines] == ["finalized"] * sessions
    assert [(line.interactions, line.rewards_given) for line in lines] == [(1, 1)] * sessions
    if name == "runner":
        assert "2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["inference", "inference-blocking"])
async def test_the_pages_example_loads_the_trained_model(
    name: str,
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A trial's folder with a checkpoint, as training leaves it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANY_AGENT_USER", "me")
    trial = save_trial(Path("runs"), {(1, 1): tiny_model_dir}, base=tiny_model_dir)
    trial.path.rename(trial.path.with_name("first"))
    trial.path.parent.rename(tmp_path / "runs/me/arithmetic")
    await run(name)
    assert capsys.readouterr().out.endswith("\n")
