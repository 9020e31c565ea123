"""Every block of docs/how-to/sdk.md and use-the-model.md runs as it is written."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.support.sdk_fixtures import Served
from tests.support.trials import save_trial

HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "how-to"
_NAMED = re.compile(r"^<!-- test: ([a-z-]+) -->\n```python\n(.*?)^```$", re.M | re.S)
RUN = {"sdk.md": ("session", "ambient"), "use-the-model.md": ("inference-blocking", "inference")}
TEXTS = {page: (HOW_TO / page).read_text(encoding="utf-8") for page in RUN}
BLOCKS = {name: block for text in TEXTS.values() for name, block in _NAMED.findall(text)}


@pytest.mark.parametrize("page", RUN)
def test_every_python_block_of_the_page_has_a_test(page: str) -> None:
    assert tuple(name for name, _ in _NAMED.findall(TEXTS[page])) == RUN[page]
    assert TEXTS[page].count("```python") == len(RUN[page])


async def run(name: str) -> None:
    """As a program, without its process: that would take longer than what it does."""
    code = compile(BLOCKS[name], f"docs/how-to:{name}", "exec")
    await asyncio.to_thread(exec, code, {"__name__": "__main__"})


@pytest.mark.parametrize(("name", "sessions"), [("session", 1), ("ambient", 4)])
@pytest.mark.service
async def test_sessions_of_the_pages_examples_are_finalized_with_rewards(
    name: str, sessions: int, served: Served
) -> None:
    await run(name)
    lines = [line async for line in served.proxy.client.sessions()]
    assert [line.state for line in lines] == ["finalized"] * sessions
    assert [(line.interactions, line.rewards_given) for line in lines] == [(1, 1)] * sessions


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
