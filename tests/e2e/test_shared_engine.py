"""Two training runs share one engine, each with an adapter of its own that it trains.

The engine dies once, and its adapters with it: the runs bring them back.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from any_agent.auth.access import run_dir_of
from any_agent.config import Config
from any_agent.launcher import Node, NodeOptions
from any_agent.rundir.layout import published_versions, weights_folder
from any_agent.runtime.ports import free_port
from tests.support.e2e.live_run import drive, live_config, recompute, recorded, steps_of
from tests.support.waiting import until

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]
TOLERANCE = 1e-4
STEPS = 8
SETTINGS: dict[str, dict[str, object]] = {
    "alice": {"train.lora.rank": 4, "train.lora.alpha": 16, "train.seed": 1},
    "bob": {"train.lora.rank": 8, "train.lora.target_modules": "[q_proj,v_proj]"},
}


class SharedEngine:
    """An engine process with room for two adapters."""

    def __init__(self, model: Path, log: Path) -> None:
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "any_agent.engine.embedded", "--live-adapters", "2"]
        self._command += ["--model-path", str(model), "--port", str(port)]
        self._command += ["--incremental-streaming-output"]
        self._log = log

    def start(self) -> None:
        with open(self._log, "ab") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=out)

    async def ready(self) -> None:
        await until(self._is_up, "the engine", within=120)

    def versions(self) -> dict[str, str]:
        """The adapters that it has."""
        told = httpx.get(f"{self.url}/server_info", trust_env=False).json()
        return dict(told["live_adapters"]["versions"])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    async def _is_up(self) -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                return (await http.get(f"{self.url}/health")).status_code == 200
        except httpx.HTTPError:
            return False


def merged_versions(config: Config, folder: Path) -> Path:
    """The whole models of a run's published adapters, as peft merges them."""
    root = run_dir_of(config).adapters
    for version in published_versions(root):
        base = AutoModelForCausalLM.from_pretrained(config.model.path, dtype="float32")
        adapter = weights_folder(root, version) / "adapter"
        whole: Any = PeftModel.from_pretrained(base, adapter)
        whole.merge_and_unload().save_pretrained(weights_folder(folder, version))
    return folder


def test_two_runs_train_their_adapters_on_one_engine_at_once(
    tmp_path: Path, tiny_model_dir: Path, record_property: Any
) -> None:
    small = {"rollout.batch_size": 8, "rollout.max_concurrent": 16, "train.steps": STEPS}
    small |= {"train.lr": 1e-2, "server.ranks": 1, "sampling.max_new_tokens": 60}
    engine = SharedEngine(tiny_model_dir, tmp_path / "engine.log")
    configs = {}
    for name, settings in SETTINGS.items():
        own = {"trial": name, "engine.urls": f"[{engine.url}/adapters/{name}]"}
        configs[name] = live_config(tmp_path, tiny_model_dir, **(small | settings | own))
    options = NodeOptions(say=lambda _: None)

    async def both(*nodes: Node) -> list[int]:
        # No run must have ended before the other has begun.
        await until(lambda: engine.versions() == dict.fromkeys(SETTINGS, "1"), within=240)
        async with asyncio.TaskGroup() as group:
            drives = [group.create_task(drive(node, agents=8)) for node in nodes]
            await until(lambda: all(steps_of(node.dir) for node in nodes), "steps", within=240)
            assert all(len(steps_of(node.dir)) < STEPS for node in nodes)
            await asyncio.to_thread(engine.kill)
            engine.start()
        return [drive.result() for drive in drives]

    engine.start()
    asyncio.run(engine.ready())
    try:
        with Node(configs["alice"], options) as alice, Node(configs["bob"], options) as bob:
            assert min(asyncio.run(both(alice, bob))) >= STEPS * 8
        assert engine.versions().keys() == SETTINGS.keys()
    finally:
        engine.kill()

    weights = {name: merged_versions(configs[name], tmp_path / name) for name in configs}
    for name, config in configs.items():
        run = run_dir_of(config)
        assert [line["step"] for line in steps_of(run)] == [*range(1, STEPS + 1)]
        assert not published_versions(run.weights), "all weights were written, too"
        sessions = recorded(config)
        checks = recompute(config, sessions, weights=weights[name])
        versions = {int(v) for c in checks for v in c.interaction.output_versions}
        worst = max(c.error for c in checks)
        lines = [line for line in steps_of(run) if "mismatch_fresh" in line]
        mismatch = max(abs(line["mismatch_fresh"]) for line in lines)
        other = next(folder for each, folder in weights.items() if each != name)
        wrong = max(c.error for c in recompute(config, sessions, weights=other))
        record_property(
            "figure",
            f"{name}: {len(checks)} calls under versions {sorted(versions)}: worst error "
            f"{worst:.1e}, {wrong:.1e} under the other run's adapter, mismatch {mismatch:.1e}",
        )
        assert len(versions) >= STEPS and 0 not in versions
        assert worst < TOLERANCE and mismatch < TOLERANCE
        assert wrong > 100 * TOLERANCE, "adapters that agree prove nothing"
