"""A service on an engine that runs already, and requires a key: `engine.urls` and `engine.key`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from any_agent.auth.engine_key import write_key_file
from any_agent.errors import ConfigError
from any_agent.inference import RemoteSGLangEngine
from any_agent.launcher import Node, NodeOptions
from any_agent.types import GenerationHyperparameters
from tests.support.e2e.live_run import drive, live_config
from tests.support.engine.process import EngineProcess
from tests.support.errors import fails_with

KEY = "the-engines-own-key"


def test_an_engine_that_requires_a_key_is_served_and_trained(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_key_file(tmp_path / "key.json", KEY)
    settings = {"server.ranks": 1, "train.steps": 1, "rollout.batch_size": 4}
    settings |= {"rollout.max_concurrent": 8, "sampling.max_new_tokens": 12}
    with EngineProcess(tmp_path) as engine:
        engine.start(tiny_model_dir, "--key-file", str(tmp_path / "key.json"))
        settings["engine.urls"] = engine.url
        for given in ({}, {"engine.key": "another-key"}):
            config = live_config(tmp_path / "refused", tiny_model_dir, **settings, **given)
            with (
                fails_with(ConfigError, "engine.key"),
                Node(config, NodeOptions(say=lambda _: None)),
            ):
                pass
        config = live_config(tmp_path, tiny_model_dir, **settings, **{"engine.key": KEY})
        with Node(config, NodeOptions(say=lambda _: None)) as node:
            processes = {name: psutil.Process(part.pid) for name, part in node.parts.items()}
            assert processes.keys() == {"rank-0", "router", "trainer"}
            holders = {n for n, one in processes.items() if KEY in one.environ().values()}
            assert holders == {"rank-0", "trainer"}
            assert not any(KEY in " ".join(one.cmdline()) for one in processes.values())
            # Sessions, a step, and its weights in the engine.
            assert asyncio.run(drive(node, agents=4)) >= 4
        assert KEY not in node.dir.resolved.read_text()
        for log in node.dir.logs.iterdir():
            assert KEY not in log.read_text(errors="replace")
        monkeypatch.setenv("ANY_AGENT_ENGINE__KEY", KEY)
        with RemoteSGLangEngine().initialize(url=engine.url, tokenizer=str(tiny_model_dir)) as own:
            wanted = GenerationHyperparameters(max_new_tokens=4, ignore_eos=True)
            assert len(own.generate([5, 6, 7], wanted).output_tokens) == 4
            assert own.version >= 1
