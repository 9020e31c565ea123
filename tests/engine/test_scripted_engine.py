"""The fake that other tests lean on keeps SGLang's contract itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from any_agent.engine.model_fingerprint import shape_of
from tests.support.engine.sglang import BOTH, PROMPT, all_of, client_of, joined, request, until
from tests.support.engine.sglang_contract import SGLangContract, call
from tests.support.scripted_engine import VOCABULARY, ScriptedEngine
from tests.support.scripted_run import Plant
from tests.support.true_logprobs import TrueModel


class TestCumulative(SGLangContract):
    @pytest.fixture
    async def url(self) -> AsyncIterator[str]:
        async with ScriptedEngine(pace=0.0005).serve() as url:
            yield url


class TestIncremental(SGLangContract):
    @pytest.fixture
    async def url(self) -> AsyncIterator[str]:
        async with ScriptedEngine(pace=0.0005, incremental=True).serve() as url:
            yield url


class TestTrue(SGLangContract):
    """With log-probabilities of a model."""

    @pytest.fixture
    async def url(self, model: TrueModel) -> AsyncIterator[str]:
        async with ScriptedEngine(pace=0.0005, incremental=True, model=model).serve() as url:
            yield url


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> TrueModel:
    return TrueModel(tiny_model_dir)


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape, other weights."""
    from any_agent.demo.models.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=1)


SAID = [30, 31, 32, 33, 34]


@BOTH
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_chosen_tokens_have_their_true_logprobs(
    model: TrueModel, stream: bool, temperature: float
) -> None:
    scripted = ScriptedEngine(model=model)
    async with scripted.serve(), client_of(scripted) as client:
        scripted.say(SAID)
        ask = replace(request(temperature=temperature), top_logprobs=3)
        chunks = await all_of(client, ask, stream=stream)
    ids, logprobs, _ = joined(chunks)
    expected = model.logprobs(PROMPT, SAID, {"temperature": temperature})
    assert ids == SAID
    assert logprobs == pytest.approx(expected.gather(-1, torch.tensor(SAID)[:, None])[:, 0])
    tops = [top for chunk in chunks for top in chunk.top_logprobs or []]
    assert [[i for i, _ in top] for top in tops] == expected.topk(3).indices.tolist()
    assert [p for top in tops for _, p in top] == pytest.approx(expected.topk(3).values.flatten())


async def test_true_logprobs_are_bent(model: TrueModel) -> None:
    scripted = ScriptedEngine(model=model)
    bias = {"logit_bias": ((30, 5.0),), "frequency_penalty": 1.0}
    async with scripted.serve(), client_of(scripted) as client:
        scripted.say([30, 30])
        _, logprobs, _ = joined(await all_of(client, request(**bias), stream=False))
    plain = model.logprobs(PROMPT, [30, 30], {})
    for k, shift in enumerate((5.0, 4.0)):
        row = plain[k].clone()
        row[30] += shift
        assert logprobs[k] == pytest.approx(torch.log_softmax(row, -1)[30].item(), abs=1e-4)


async def test_an_update_changes_the_true_logprobs(
    tiny_model_dir: Path, other_weights: Path
) -> None:
    model, other = TrueModel(tiny_model_dir), TrueModel(other_weights)
    scripted = ScriptedEngine(model=model, resumes=True)
    async with scripted.serve(), client_of(scripted) as client:
        scripted.say(SAID)
        scripted.hold(2)
        work = asyncio.create_task(all_of(client, request(), stream=True))
        await until(lambda: any(len(r.ids) == 2 for r in scripted.running.values()))
        await client.pause()
        update = {"model_path": str(other_weights), "weight_version": "1"}
        assert (await call(scripted.url, "/update_weights_from_disk", update))[0] == 200
        await client.resume(1)
        ids, logprobs, versions = joined(await work)
    before, after = (m.logprobs(PROMPT, SAID, {}) for m in (TrueModel(tiny_model_dir), other))
    assert (ids, versions) == (SAID, [0, 0, 1, 1, 1])
    expected = [before[0, 30], before[1, 31], after[2, 32], after[3, 33], after[4, 34]]
    assert logprobs == pytest.approx([float(p) for p in expected])


async def test_steps_let_one_token_out_each(scripted: ScriptedEngine) -> None:
    steps = scripted.step()
    async with client_of(scripted) as client:
        chunks = client.generate(request(max_new_tokens=3), stream=True)
        for k in range(3):
            steps.release()
            chunk = await anext(chunks)
            assert len(chunk.output_ids) == 1
            assert (chunk.stop_reason is None) == (k < 2)


async def answered(scripted: ScriptedEngine, ids: list[int]) -> dict[str, Any]:
    scripted.say(SAID)
    sampling = {"max_new_tokens": 5, "temperature": 0.5}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    _, answer = await call(scripted.url, "/generate", body)
    assert answer["output_ids"] == SAID
    return answer


async def test_what_is_planted_shows(model: TrueModel) -> None:
    ids = list(range(5, 13))
    scripted = ScriptedEngine(model=model)

    def logprobs(answer: dict[str, Any]) -> list[float]:
        return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]

    def expected(ids: list[int], temperature: float) -> Any:
        table = model.logprobs(ids, SAID, {"temperature": temperature})
        return pytest.approx(table.gather(-1, torch.tensor(SAID)[:, None])[:, 0].tolist())

    async with scripted.serve():
        good = await answered(scripted, ids)
        assert logprobs(good) == expected(ids, 0.5)
        scripted.planted = {"unscaled"}
        assert logprobs(await answered(scripted, ids)) == expected(ids, 1.0)
        for plant, told in (("truncates", 4), ("truncates_unsaid", 8)):
            scripted.planted = {plant}  # type: ignore[arg-type]
            answer = await answered(scripted, ids)
            assert logprobs(answer) == expected(ids[4:], 0.5)
            assert answer["meta_info"]["prompt_tokens"] == told
        scripted.planted = {"other_text"}
        assert (await answered(scripted, ids))["text"] != good["text"]


@pytest.mark.parametrize("plant", ["stale_weights", "stale_version"])
async def test_a_planted_stale_update(
    tiny_model_dir: Path, other_weights: Path, plant: Plant
) -> None:
    scripted = ScriptedEngine(model=TrueModel(tiny_model_dir))
    update = {"model_path": str(other_weights), "weight_version": "1"}
    async with scripted.serve():
        scripted.planted = {plant}
        before = await answered(scripted, [5, 6])
        assert (await call(scripted.url, "/update_weights_from_disk", update))[0] == 200
        after = await answered(scripted, [5, 6])
    same = (
        before["meta_info"]["output_token_logprobs"] == after["meta_info"]["output_token_logprobs"]
    )
    assert same == (plant == "stale_weights")
    assert after["meta_info"]["weight_version"] == ("1" if plant == "stale_weights" else "0")


def test_it_knows_the_ids_of_the_tests_model(tiny_model_dir: Path) -> None:
    assert shape_of(str(tiny_model_dir)).vocab_size == VOCABULARY
