"""One engine object for a script, on the embedded engine: what it answers is exact."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from any_agent import (
    GRPOConfig,
    LocalModel,
    ModelRequest,
    ModelResponse,
    RemoteSGLangEngine,
    RLVRWorkflow,
    load_engine,
)
from any_agent.config import RolloutConfig
from any_agent.engine.pool import EnginePool
from any_agent.errors import ContextLengthExceeded, EngineUnavailable, InvalidRequest
from any_agent.rundir.layout import RunDir
from any_agent.types import GenerationHyperparameters
from any_agent.workflow import RolloutWorkflow
from tests.support.errors import fails_with
from tests.support.proxy import until
from tests.support.true_logprobs import TrueModel
from tests.support.workflow.tensors import tensors

QUESTION = "What is reinforcement learning?"
MESSAGES = [{"role": "user", "content": QUESTION}]
PLACE: dict[str, Any] = {"experiment_name": "exp", "trial_name": "one", "user": "me"}


@pytest.fixture(scope="module")
def engine(trial: RunDir) -> Iterator[RemoteSGLangEngine]:
    with RemoteSGLangEngine(RolloutConfig(batch_size=4)) as engine:  # type: ignore[call-arg]
        yield engine.initialize(**PLACE, root=trial.path.parents[2])


def check(response: ModelResponse, model: Path, temperature: float, version: int) -> None:
    """Every number against a fresh pass of those weights."""
    ids = response.output_tokens
    table = TrueModel(model).logprobs(response.input_tokens, ids, {"temperature": temperature})
    expected = table.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
    assert response.logprobs == pytest.approx(expected, abs=1e-4)
    assert response.output_versions == [version] * response.output_len
    assert (response.token_ids, type(response.input_tokens)) == (ids, list)


async def test_a_text_is_asked_of_the_newest_checkpoint(
    engine: RemoteSGLangEngine, models: list[Path]
) -> None:
    response = await engine.agenerate(prompt=QUESTION, temperature=0.7, max_tokens=12)
    check(response, models[1], 0.7, 21)
    assert response.input_tokens == engine.chat_format.render(MESSAGES, None)
    assert response.text == engine.tokenizer.decode(response.token_ids, skip_special_tokens=True)
    assert (engine.version, engine.get_version()) == (21, 21)
    assert engine.path is not None and engine.path.name == "step-00000020"


def test_a_named_checkpoint_answers_under_its_version(trial: RunDir, models: list[Path]) -> None:
    root = trial.path.parents[2]
    with RemoteSGLangEngine().initialize(**PLACE, root=root, version=11) as engine:
        gconfig = GenerationHyperparameters(max_new_tokens=8, ignore_eos=True)
        check(engine.generate([5, 6, 7], gconfig), models[0], 1.0, 11)


async def test_every_way_to_ask_gives_the_same_answer(engine: RemoteSGLangEngine) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 6}
    ids = engine.chat_format.render(MESSAGES, None)
    stops = engine.chat_format.stop_token_ids
    said = [
        await engine.agenerate(prompt=QUESTION, **greedy),
        await engine.agenerate(prompt=MESSAGES, **greedy),
        await engine.agenerate(messages=MESSAGES, temperature=0.0, max_new_tokens=6),
        await engine.agenerate(input_ids=torch.tensor([ids]), stop_token_ids=stops, **greedy),
        await engine.agenerate(ModelRequest(prompt=MESSAGES, temperature=0.0, max_tokens=6)),
    ]
    assert len({(tuple(r.input_tokens), tuple(r.output_tokens), r.text) for r in said}) == 1


async def test_a_stream_adds_up_to_the_whole_answer(engine: RemoteSGLangEngine) -> None:
    asked: dict[str, Any] = {"prompt": QUESTION, "seed": 7, "max_tokens": 24}
    last = (await engine.agenerate(**asked)).token_ids[5]
    for more, matched in (({}, None), ({"stop": ["e"]}, "e"), ({"stop_token_ids": last}, last)):
        whole = await engine.agenerate(**asked, **more)
        chunks = [chunk async for chunk in engine.agenerate_stream(**asked, **more)]
        assert matched is None or whole.matched_stop == matched
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [i for chunk in chunks for i in chunk.output_ids] == whole.token_ids
        assert [p for chunk in chunks for p in chunk.logprobs] == whole.logprobs
        assert more != {"stop": ["e"]} or "e" not in whole.text


async def test_a_stream_that_is_left_or_a_call_that_is_cancelled_ends_its_request(
    engine: RemoteSGLangEngine,
) -> None:
    stream = engine.agenerate_stream(prompt=QUESTION, max_tokens=2000, ignore_eos=True)
    await anext(stream)
    await stream.aclose()

    async def idle(pool: EnginePool) -> bool:
        return not pool.calls

    await until(lambda: engine.ask(idle))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await engine.agenerate(prompt=QUESTION, max_tokens=2000, ignore_eos=True)
    await until(lambda: engine.ask(idle))
    assert len((await engine.agenerate(prompt=QUESTION, max_tokens=2)).token_ids) <= 2


def test_calls_from_many_event_loops_get_their_own_answers(engine: RemoteSGLangEngine) -> None:
    async def several(n: int) -> list[ModelResponse]:
        ids = [[5 + n, 6, k] for k in range(8)]
        asked = [engine.agenerate(input_ids=i, temperature=0.0, max_tokens=4) for i in ids]
        return list(await asyncio.gather(*asked))

    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(lambda n: asyncio.run(several(n)), range(4)))
    for n, responses in enumerate(got):
        assert [r.input_tokens for r in responses] == [[5 + n, 6, k] for k in range(8)]


async def test_an_answer_has_the_context_s_room(engine: RemoteSGLangEngine) -> None:
    ids = [5] * (engine.context_length - 3)
    assert (await engine.agenerate(input_ids=ids, ignore_eos=True)).output_len == 3
    with fails_with(ContextLengthExceeded, "has 2048 tokens"):
        await engine.agenerate(input_ids=[5] * engine.context_length)


@pytest.mark.parametrize(
    ("asked", "error", "says"),
    [
        ({}, ValueError, "prompt=, messages= and input_ids="),
        ({"prompt": "a", "input_ids": [1]}, ValueError, "input_ids="),
        ({"prompt": "a", "max_tokens": 1, "max_new_tokens": 2}, ValueError, "max_tokens"),
        ({"prompt": "a", "stream": True}, TypeError, "agenerate_stream"),
        ({"prompt": "a", "heat": 1}, TypeError, "heat"),
        ({"prompt": 3}, InvalidRequest, "messages"),
        ({"messages": [{"content": "a"}]}, InvalidRequest, "role"),
        ({"input_ids": [[1], [2]]}, InvalidRequest, "one prompt's token ids"),
        ({"input_ids": [380]}, InvalidRequest, "the vocabulary"),
        ({"input_ids": []}, InvalidRequest, "empty"),
    ],
)
async def test_wrong_questions_are_refused_whole_and_streamed(
    engine: RemoteSGLangEngine, asked: dict[str, Any], error: type[Exception], says: str
) -> None:
    with fails_with(error, says):
        await engine.agenerate(**asked)
    with fails_with(error, says):
        async for _ in engine.agenerate_stream(**asked):
            pass
    with fails_with(ValueError, "temperature", "gconfig"):
        await engine.agenerate(ModelRequest(prompt="a"), temperature=1.0)


def test_a_script_can_ask_a_loaded_model_without_an_event_loop(trial: RunDir) -> None:
    root = trial.path.parents[2]
    with load_engine("exp", "one", user="me", root=root) as model:
        assert isinstance(model, LocalModel)
        said = model.chat(MESSAGES, max_tokens=4, temperature=0.0)
        assert said["role"] == "assistant"
        with fails_with(RuntimeError, "already"):
            model.initialize(**PLACE, root=root)


async def test_closing_an_engine_fails_its_running_calls(models: list[Path]) -> None:
    engine = RemoteSGLangEngine()
    with fails_with(EngineUnavailable, "initialize"):
        await engine.agenerate(prompt="a")
    async with engine.initialize(model=models[0]) as same:
        assert same is engine
        # A paused engine cannot finish them before it is closed.
        await engine.ask(lambda pool: pool.pause())
        running = asyncio.create_task(engine.agenerate(prompt="b", ignore_eos=True))
        stream = engine.agenerate_stream(prompt="a", ignore_eos=True)
        streaming = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
    for ends in (running, streaming):
        with pytest.raises(EngineUnavailable):
            await ends
    with fails_with(EngineUnavailable, "initialize"):
        engine.submit({"n": 0}, Saying())
    engine.destroy()


class Saying(RolloutWorkflow):
    """Asks the engine that it is given, and the script's own."""

    def __init__(self, own: RemoteSGLangEngine | None = None) -> None:
        self._own = own

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        response = await engine.agenerate(ModelRequest(prompt=data["question"], max_tokens=4))
        if self._own is not None:
            again = await self._own.agenerate(prompt=data["question"], max_tokens=4)
            assert again.input_tokens == response.input_tokens
            with fails_with(RuntimeError, "block"):
                self._own.chat(MESSAGES)
        assert isinstance(response.text, str)
        return tensors([1, 2, data["n"]])


def test_workflows_run_on_an_engine_object(engine: RemoteSGLangEngine) -> None:
    items = [{"n": n, "question": QUESTION} for n in range(3)]
    for item in items:
        engine.submit(data=item, workflow=Saying, workflow_kwargs={}, group_size=2)
    assert [r is not None and len(r["rewards"]) for r in engine.wait(3, timeout=60)] == [2, 2, 2]
    engine.pause()
    engine.resume()
    assert len(engine.rollout_batch(items, workflow=Saying(engine))) == 3
    assert len(engine.prepare_batch(items, workflow=Saying(), timeout=60)) == 4


def test_a_scripts_configuration_serves_its_model_and_sampling(
    models: list[Path], tmp_path: Path
) -> None:
    config = GRPOConfig.model_validate(
        {
            "model": {"path": str(models[0]), "enable_thinking": False},
            "sampling": {"max_new_tokens": 5, "temperature": 0.9},
            "rollout": {"dump_to_file": True, "fileroot": str(tmp_path)},
        }
    )
    with RemoteSGLangEngine(config).initialize() as engine:
        workflow = RLVRWorkflow(
            "any_agent.rewards.async_wrapper.gsm8k_reward_fn", None, engine.tokenizer
        )
        (batch,) = engine.rollout_batch([{"messages": MESSAGES, "answer": "3"}], workflow)
    assert batch["temperatures"].tolist() == pytest.approx([0.9])
    assert int(batch["loss_mask"].sum()) <= 5
    assert len(list(tmp_path.rglob("*.jsonl"))) == 1


def test_closing_an_engine_ends_the_calls_of_other_threads(models: list[Path]) -> None:
    engine = RemoteSGLangEngine().initialize(model=models[0])
    gconfig = GenerationHyperparameters(max_new_tokens=3)
    asked = threading.Event()

    def ask() -> None:
        try:
            while True:
                engine.generate([5, 6], gconfig)
                asked.set()
        except EngineUnavailable:
            return

    with ThreadPoolExecutor(4) as threads:
        works = [threads.submit(ask) for _ in range(4)]
        assert asked.wait(60)
        engine.close()
        for work in works:
            work.result(60)
