"""The same agent on the same tasks, run by the trainer or outside of it: the same batches.

Both are whole runs, of a service and a trainer of their own; each trainer writes down what it
trains on.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from any_agent.config import Config, load_config
from any_agent.launcher import Node, NodeOptions
from any_agent.launcher import node as launching
from any_agent.launcher.trial import trial_dir
from tests.support.e2e.counting_agent import CountingAgent, items
from tests.support.e2e.saved import different

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
GROUP, BATCH = 4, 8
LIMIT = 600.0


def settings(model: Path, root: Path) -> list[str]:
    """As on a command line."""
    given = {
        "root": root,
        "model.path": model,
        "model.enable_thinking": "false",
        "server.port": 0,
        "sampling.max_new_tokens": 12,
        "sampling.temperature": 0.8,
        "sessions.group_size": GROUP,
        "rollout.batch_size": BATCH,
        "rollout.max_concurrent": BATCH,
        "rollout.eta": 0,
        "rollout.deterministic": "true",
        "engine.max_running_requests": 1,
        "train_dataset.shuffle": "false",
        "train.steps": STEPS,
        "train.lr": 1e-3,
        "train.discount": 0.9,
        "train.seed": 3,
        "train.keep_weights": STEPS + 1,
    }
    return [f"{name}={value}" for name, value in given.items()]


async def drive(node: Node) -> None:
    """Each task's agents open their sessions one after the other, and then run at once."""
    async with asyncio.timeout(LIMIT), httpx.AsyncClient(timeout=240) as http:
        running: set[asyncio.Task[None]] = set()
        try:
            for item in (item for item in items() for _ in range(GROUP)):
                opened = await _open(node, http, item["task_id"])
                if opened is None:
                    break
                running.add(asyncio.create_task(_run(node, http, opened, item)))
            while not node.check():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        finally:
            for task in running:
                task.cancel()
            ended = await asyncio.gather(*running, return_exceptions=True)
        failed = [one for one in ended if isinstance(one, Exception)]
        assert not failed, failed[:3]


async def _open(node: Node, http: httpx.AsyncClient, task: str) -> dict[str, Any] | None:
    """A session by the route that AReaL's documents name; None when training has ended."""
    while True:
        node.check()
        opened = await http.post(f"{node.url}/rl/start_session", json={"task_id": task})
        if opened.status_code == 200:
            return dict(opened.json())
        if opened.status_code == 409:
            assert opened.json()["error"]["code"] == "run_finished", opened.text
            return None
        # The trainer takes no more until it has stepped.
        assert opened.status_code == 429, opened.text
        await asyncio.sleep(0.05)


async def _run(
    node: Node, http: httpx.AsyncClient, opened: dict[str, Any], item: dict[str, Any]
) -> None:
    key = {"Authorization": f"Bearer {opened['api_key']}"}
    rewards = await CountingAgent().run(
        item, base_url=f"{node.url}/v1", api_key=opened["api_key"], http_client=http
    )
    for id, reward in rewards.items():
        body = {"interaction_id": id, "reward": reward}
        given = await http.post(f"{node.url}/rl/set_reward", json=body, headers=key)
        assert given.status_code == 200, given.text
    ended = await http.post(f"{node.url}/rl/end_session", json={}, headers=key)
    assert ended.status_code == 200, ended.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        yield tmp_path_factory.mktemp("fed")


@pytest.fixture(scope="module")
def proxy_fed(folder: Path, tiny_model_dir: Path) -> tuple[Config, Path]:
    """The run, and where its batches are."""
    config = load_config(None, settings(tiny_model_dir, folder / "proxy"), environ={})
    out = folder / "proxy-batches"
    out.mkdir()
    recording = ["tests.support.e2e.recording", str(out), "proxy", "--"]
    real = launching.trainer_arguments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "trainer_arguments", lambda *told: [*recording, *real(*told)[1:]])
        with Node(config, NodeOptions(say=lambda _: None)) as node:
            asyncio.run(drive(node))
    return config, out


@pytest.fixture(scope="module")
def dataset_fed(folder: Path, tiny_model_dir: Path) -> tuple[Config, Path]:
    """The same, of a researcher's script."""
    given = settings(tiny_model_dir, folder / "dataset")
    out = folder / "dataset-batches"
    out.mkdir()
    command = [
        sys.executable,
        "-m",
        "tests.support.e2e.recording",
        str(out),
        "dataset",
        "--",
        *given,
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return load_config(None, given, environ={}), out


def batches(out: Path) -> list[dict[str, torch.Tensor]]:
    assert len(list(out.iterdir())) == STEPS
    return [load_file(out / f"step-{step}.safetensors") for step in range(1, STEPS + 1)]


def test_batches_of_a_dataset_and_of_the_proxy_are_equal_token_for_token(
    proxy_fed: tuple[Config, Path], dataset_fed: tuple[Config, Path]
) -> None:
    """Ids, masks, log-probabilities, versions, rewards, advantages, in the same order."""
    ours, theirs = batches(proxy_fed[1]), batches(dataset_fed[1])
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        assert different(one, other) == [], f"step {step}"
    rows = [{name.split(".")[0] for name in batch} for batch in ours]
    assert [len(of_step) for of_step in rows] == [2 * BATCH] * STEPS
    firsts = [batch["0000.input_ids"].tolist() for batch in ours]
    assert len({tuple(ids) for ids in firsts}) == STEPS, "each step has tasks of its own"
    assert all(batch[name].any() for batch in ours for name in batch if "advantages" in name)


def test_weights_trained_by_dataset_and_by_proxy_are_equal_bit_for_bit(
    proxy_fed: tuple[Config, Path], dataset_fed: tuple[Config, Path]
) -> None:
    ours, theirs = trial_dir(proxy_fed[0]).weights, trial_dir(dataset_fed[0]).weights
    names = sorted(path.name for path in ours.iterdir())
    assert names == sorted(path.name for path in theirs.iterdir()) and len(names) == STEPS
    for name in names:
        one, other = (load_file(weights / name / "model.safetensors") for weights in (ours, theirs))
        assert different(one, other) == [], name
