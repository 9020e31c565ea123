"""The example of docs/how-to/direct-client.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from any_agent import EngineOpenAI
from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.engine.embedded.server import EngineServer, listen

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "direct-client.md"


async def test_the_documented_example_collects_rewarded_trajectories(tiny_model_dir: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    names: dict[str, Any] = {"__name__": "guess"}
    exec(compile(code, str(DOCUMENT), "exec"), names)
    async with EmbeddedEngine.load(str(tiny_model_dir)) as engine:
        runner, port = await listen(EngineServer(engine, incremental=True), "127.0.0.1", 0)
        trajectories = await names["main"](f"http://127.0.0.1:{port}", str(tiny_model_dir))
        await runner.cleanup()
    assert len(trajectories) == 4
    assert {t.group_id for t in trajectories} == {"What is 2 + 3?"}
    for trajectory in trajectories:
        first, second = trajectory.interactions
        assert first.reward is None
        assert second.reward in (0.0, 1.0)


def test_the_client_has_every_documented_method() -> None:
    cells = re.findall(r"^\| `([^|]*)` \| ", DOCUMENT.read_text(), re.M)
    names = {name.partition("(")[0] for cell in cells for name in cell.split("`, `")}
    assert names and not [name for name in names if not hasattr(EngineOpenAI, name)]
