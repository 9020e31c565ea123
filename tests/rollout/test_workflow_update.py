"""Weight updates under workflows' calls, on real engines: every number is exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from any_agent.engine import EnginePool
from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.engine.embedded.model_loader import LoadedModel, load_model
from any_agent.engine.embedded.server import EngineServer, listen
from any_agent.runtime.event_loop import LoopThread
from any_agent.types import GenerationHyperparameters, ModelRequest
from any_agent.workflow import RolloutWorkflow
from tests.support.other_weights import publish_other
from tests.support.workflow_executor import executor, until

TOKENS, TURNS, EPISODES = 120, 2, 8
TEMPERATURE = 0.8


class Talk(RolloutWorkflow):
    """A conversation of two turns, each of which goes on from all ids before it."""

    def __init__(self) -> None:
        self.begun = 0

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        self.begun += 1
        ids = [4 + (31 * data["n"] + 7 * i) % 370 for i in range(9)]
        row: dict[str, list[Any]] = {"loss": [0] * 9, "logprobs": [0.0] * 9, "versions": [-1] * 9}
        gconfig = GenerationHyperparameters(
            max_new_tokens=TOKENS, temperature=TEMPERATURE, ignore_eos=True
        )
        for turn in range(TURNS):
            request = ModelRequest(rid=f"talk-{data['n']}", input_ids=ids, gconfig=gconfig)
            said = await engine.agenerate(request)
            asked = [5 + turn]
            ids = [*ids, *said.output_ids, *asked]
            row["loss"] += [1] * len(said.output_ids) + [0]
            row["logprobs"] += [*said.output_logprobs, 0.0]
            row["versions"] += [*said.output_versions, -1]
        return {
            "input_ids": torch.tensor([ids], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
            "loss_mask": torch.tensor([row["loss"]], dtype=torch.int32),
            "logprobs": torch.tensor([row["logprobs"]], dtype=torch.float32),
            "versions": torch.tensor([row["versions"]], dtype=torch.int32),
            "rewards": torch.ones(1),
        }


@contextmanager
def engines(model: Path, count: int) -> Iterator[list[str]]:
    """Embedded engines behind SGLang's contract, on a thread of their own."""
    thread = LoopThread("engines")
    thread.start()
    stops: list[Any] = []

    async def start() -> str:
        engine = EmbeddedEngine.load(str(model))
        await engine.__aenter__()
        runner, port = await listen(EngineServer(engine), "127.0.0.1", 0)
        stops.extend((runner.cleanup, engine.__aexit__))
        return f"http://127.0.0.1:{port}"

    try:
        yield [thread.call(start()) for _ in range(count)]
    finally:
        for stop in stops:
            thread.call(stop())
        thread.stop()


def update(url: str, folder: Path, version: int) -> None:
    """As a rank's proxy and the trainer do it: of the pool the engine knows nothing."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        http.post("/pause_generation", json={"mode": "abort"}).raise_for_status()
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        assert http.post("/update_weights_from_disk", json=body).json()["success"]
        http.post("/continue_generation", json={}).raise_for_status()


def worst(row: dict[str, np.ndarray[Any, Any]], models: list[LoadedModel]) -> float:
    """The largest error of a row's log-probabilities, each under its version's weights."""
    ids = torch.from_numpy(row["input_ids"].astype(np.int64))[None]
    errors = []
    for version, loaded in enumerate(models):
        with torch.inference_mode():
            logits = loaded.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        fresh = torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, ids[0, 1:, None])[:, 0]
        mine = row["versions"][1:] == version
        errors.append(np.abs(fresh.numpy()[mine] - row["logprobs"][1:][mine]).max(initial=0.0))
    return float(max(errors))


def test_calls_go_on_exactly_across_updates(
    tiny_model_dir: Path, tmp_path: Path, record_property: Any
) -> None:
    published = [publish_other(tiny_model_dir, tmp_path, version) for version in (1, 2)]
    models = [load_model(str(path)) for path in (tiny_model_dir, *published)]
    workflow = Talk()
    with engines(tiny_model_dir, 2) as urls:
        pool = EnginePool(urls, decode=models[0].decoder(skip_special_tokens=False))
        with executor(pool, batch_size=EPISODES, eta=0) as e:
            stream = iter([(n, {"n": n}) for n in range(EPISODES)])
            with pytest.raises(TimeoutError):
                e.sessions_batch(stream, workflow, timeout=0.05)
            for version, path in enumerate(published, start=1):
                until(lambda: pool.calls >= EPISODES // 2)
                e.hold()
                for url in urls:
                    update(url, path, version)
                e.release(version)
                assert e.version == version
            batch = e.sessions_batch(stream, workflow, timeout=120)
            resubmitted = sum(engine.resubmitted["update"] for engine in pool.engines)  # type: ignore[attr-defined]
    rows = [row for (session,) in batch for row in session.rows]
    assert len(rows) == EPISODES
    assert resubmitted, "no call was under way when the weights changed"
    seen = {int(v) for row in rows for v in row["versions"] if v >= 0}
    assert seen == {0, 1, 2}
    assert all(row["loss_mask"].sum() == TURNS * TOKENS for row in rows)
    error = max(worst(row, models) for row in rows)
    record_property("figure", f"workflows' calls across two updates: logprobs within {error:.1e}")
    assert error < 1e-4
