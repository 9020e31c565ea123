"""Engines that run already: the embedded one speaks SGLang's contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from any_agent import GRPOConfig, RemoteSGLangEngine
from any_agent.config import RolloutConfig
from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.server import EngineServer, listen
from any_agent.errors import ConfigError, EngineUnavailable
from any_agent.rundir.layout import RunDir
from any_agent.runtime.event_loop import LoopThread
from tests.inference.test_engine import PLACE, QUESTION, check
from tests.support.errors import fails_with
from tests.support.in_thread import served_in_thread
from tests.support.scripted_engine import ScriptedEngine


@contextmanager
def served(path: Path, version: int = 0) -> Iterator[str]:
    """The URL of an embedded engine, in a thread of its own."""
    thread = LoopThread("an engine")
    thread.start()
    engine = EmbeddedEngine.load(str(path), EngineOptions(weight_version=str(version)))

    async def start() -> tuple[Any, int]:
        await engine.__aenter__()
        return await listen(EngineServer(engine, incremental=True), "127.0.0.1", 0)

    runner, port = thread.call(start())
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        thread.call(runner.cleanup())
        thread.call(engine.__aexit__())
        thread.stop()


@pytest.fixture(scope="module")
def urls(trial: RunDir) -> Iterator[list[str]]:
    """Step 10 under its version and under none, and step 20."""
    first, second = (trial.checkpoints / f"step-{step:08d}" for step in (10, 20))
    with served(first, 11) as one, served(first) as other, served(second, 21) as latest:
        yield [one, other, latest]


async def test_a_trial_is_asked_at_the_engines_that_serve_its_version(
    trial: RunDir, models: list[Path], urls: list[str]
) -> None:
    """One that was told no version counts by its folder, and says 0."""
    root = trial.path.parents[2]
    async with RemoteSGLangEngine() as engine:
        engine.initialize(**PLACE, root=root, step=10, url=urls[0])
        check(await engine.agenerate(prompt=QUESTION, max_tokens=6), models[0], 1.0, 11)
    async with RemoteSGLangEngine() as engine:
        engine.initialize(**PLACE, root=root, step=10, urls=urls[:2])
        assert len(engine.executor.rejected) == 0
        said = [await engine.agenerate(prompt=QUESTION, max_tokens=2) for _ in range(4)]
    assert {v for one in said for v in one.output_versions} == {0, 11}


async def test_a_running_engine_needs_no_trial(models: list[Path], urls: list[str]) -> None:
    """Its folder is here, so its tokenizer is."""
    config = RolloutConfig(batch_size=1)  # type: ignore[call-arg]
    async with RemoteSGLangEngine(config).initialize(url=urls[2]) as engine:
        response = await engine.agenerate(prompt=QUESTION, max_tokens=6)
        check(response, models[1], 1.0, 21)
        assert response.text is not None
        assert engine.path is not None and engine.path.name == "step-00000020"


async def test_the_engines_of_a_scripts_configuration_are_used_at_any_version(
    models: list[Path], urls: list[str]
) -> None:
    """Training changes their weights: whatever version they are at, they are the right ones."""
    engine = {"urls": urls[:2]}
    config = GRPOConfig.model_validate({"engine": engine, "model": {"path": str(models[0])}})
    async with RemoteSGLangEngine(config).initialize() as rollout:
        response = await rollout.agenerate(prompt=QUESTION, max_tokens=4)
    check(response, models[0], 1.0, response.output_versions[0])


def test_an_engine_with_other_weights_is_refused(
    trial: RunDir, models: list[Path], urls: list[str]
) -> None:
    newest = PLACE | {"root": trial.path.parents[2]}
    for names, url, says in (
        (newest, urls[1], ("version 0", "version 21")),
        (newest | {"step": 10}, urls[2], ("version 21", "version 11")),
        # Both are version 0, of which there are as many as folders.
        ({"model": models[1]}, urls[1], ("version 0", "step-00000010")),
    ):
        with fails_with(ConfigError, *says):
            RemoteSGLangEngine().initialize(**names, url=url)


def test_an_engine_with_another_vocabulary_is_refused(trial: RunDir) -> None:
    scripted = ScriptedEngine()
    scripted.vocabulary, scripted.weight_version = 379, "21"
    engine = RemoteSGLangEngine()
    with served_in_thread(scripted, within=60):
        with fails_with(ConfigError, "380"):
            engine.initialize(**PLACE, root=trial.path.parents[2], url=scripted.url)
        with fails_with(EngineUnavailable, "initialize"):
            _ = engine.version


async def test_an_engine_whose_tokenizer_is_elsewhere_needs_it_named(models: list[Path]) -> None:
    scripted = ScriptedEngine()
    with served_in_thread(scripted, within=60):
        with fails_with(ConfigError, "scripted", "tokenizer="):
            RemoteSGLangEngine().initialize(url=scripted.url)
        engine = RemoteSGLangEngine().initialize(url=scripted.url, tokenizer=str(models[0]))
        async with engine:
            ids = engine.tokenizer.encode("It is 42.", add_special_tokens=False)
            scripted.say([*ids, engine.chat_format.stop_token_ids[0]])
            response = await engine.agenerate(prompt=QUESTION)
            assert response.text == "It is 42."
            assert scripted.requests[-1]["sampling_params"]["max_new_tokens"] < 2048
            scripted.fail("status", status=500)
            with pytest.raises(EngineUnavailable):
                await engine.agenerate(prompt=QUESTION)


async def test_a_model_without_a_chat_template_takes_ids_alone(
    models: list[Path], urls: list[str], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").symlink_to(models[0] / "tokenizer.json")
    told = json.loads((models[0] / "tokenizer_config.json").read_text())
    told.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    async with RemoteSGLangEngine().initialize(url=urls[0], tokenizer=str(tmp_path)) as engine:
        assert isinstance((await engine.agenerate(input_ids=[5, 6], max_tokens=3)).text, str)
        asked: Any = {"input_ids": [5, 6], "max_tokens": 8, "seed": 1}
        whole = await engine.agenerate(**asked)
        assert "".join([c.text async for c in engine.agenerate_stream(**asked)]) == whole.text
        with fails_with(ConfigError, "chat template"):
            await engine.agenerate(prompt=QUESTION)
