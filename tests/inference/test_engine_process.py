"""An SGLang of one's own: which is started, by which arguments, and how it ends.

What stands for it here is a module of its name that serves the scripted engine; a real one:
`tests/engine/sglang/sglang_live.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from any_agent import RemoteSGLangEngine
from any_agent.auth.engine_key import read_key_file
from any_agent.engine.pool import EnginePool
from any_agent.errors import ConfigError, StartupError
from any_agent.inference import engine_process as started
from tests.support.errors import fails_with
from tests.support.trials import save_trial

REPOSITORY = Path(__file__).parents[2]
PLACE: dict[str, Any] = {"experiment_name": "exp", "trial_name": "one", "user": "me"}
SERVES = """
import asyncio, sys
from tests.support.scripted_engine import ScriptedEngine

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

async def main():
    engine = ScriptedEngine()
    engine.weight_version = option("--weight-version")
    engine.told = {"argv": sys.argv[1:]}
    # As SGLang does at its start.
    print("server_args=", open(option("--config")).read(), flush=True)
    async with engine.serve(int(option("--port"))):
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def root(tmp_path: Path, models: list[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a trial that an SGLang served, on this machine."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(SERVES)
    path = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    monkeypatch.setenv("PYTHONPATH", path)
    settings = ["engine.kind=sglang", f"engine.python={sys.executable}", "engine.device=cpu"]
    settings.append(f"engine.environment={{PYTHONPATH: '{path}'}}")
    save_trial(tmp_path / "runs", {(20, 21): models[1]}, *settings, base=models[0])
    return tmp_path / "runs"


def test_an_sglang_is_started_and_ended(root: Path) -> None:
    """By a thread that ends before it is asked."""
    engine = RemoteSGLangEngine()
    thread = threading.Thread(target=lambda: engine.initialize(**PLACE, root=root))
    thread.start()
    thread.join(60)
    assert engine.version == 21
    assert engine.chat([{"role": "user", "content": "hi"}], max_tokens=3)["role"] == "assistant"

    async def served(pool: EnginePool) -> Any:
        (one,) = pool.engines
        return one

    sglang = asyncio.run(engine.ask(served))
    argv = httpx.get(f"{sglang.url}/server_info").json()["argv"]
    assert argv[argv.index("--model-path") + 1].endswith("step-00000020")
    assert "--incremental-streaming-output" in argv and argv[argv.index("--device") + 1] == "cpu"
    # The key is in a file of the owner's; neither the list of processes nor a log shows it.
    path = Path(argv[argv.index("--config") + 1])
    key = read_key_file(path)
    assert sglang._http.headers["Authorization"] == f"Bearer {key}"
    assert path.stat().st_mode & 0o777 == 0o600 and path.suffix == ".yaml"
    assert key not in " ".join(argv)
    log = (path.parent / "engine.log").read_text()
    assert "server_args=" in log and key not in log and len(key) * "*" in log
    engine.close()
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{sglang.url}/health")


def test_an_sglang_that_cannot_start_says_why(root: Path) -> None:
    broken = root.parent / "sglang" / "launch_server.py"
    broken.write_text("raise SystemExit('no memory left')")
    with fails_with(StartupError, "ended with 1", "no memory left"):
        RemoteSGLangEngine().initialize(**PLACE, root=root)


@pytest.mark.parametrize("lacks", ["gpu", "sglang"])
def test_the_embedded_engine_serves_where_sglang_cannot(
    root: Path, lacks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {"device": "auto" if lacks == "gpu" else "cpu"}
    monkeypatch.setattr(started, "sees_gpu", lambda: False)
    if lacks == "sglang":
        monkeypatch.delenv("PYTHONPATH")
        with fails_with(ConfigError, "no SGLang in"):
            RemoteSGLangEngine().initialize(**PLACE, root=root, kind="sglang", **asked)
    with (
        caplog.at_level(logging.WARNING),
        RemoteSGLangEngine().initialize(**PLACE, root=root, **asked) as engine,
    ):
        assert engine.version == 21
    assert f"no {'GPU' if lacks == 'gpu' else 'SGLang'}" in caplog.text
    assert "using the embedded engine" in caplog.text
