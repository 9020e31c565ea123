"""The ready workflows on a real engine: what they return is what was sampled, to the token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from any_agent import MultiTurnWorkflow, RLVRWorkflow, stats_tracker
from any_agent.chat import ChatFormat
from any_agent.engine import EnginePool
from any_agent.engine.embedded.engine import EmbeddedEngine
from any_agent.engine.embedded.model_loader import load_model
from any_agent.errors import ConfigError, ContextLengthExceeded
from any_agent.rewards.async_wrapper import RewardFailed
from any_agent.runtime import worker_pool as workers
from any_agent.types import GenerationHyperparameters, ModelRequest, ModelResponse
from any_agent.workflow import checked_tensors, context, rows_of
from any_agent.workflow.built_in import FEEDBACK
from any_agent.workflow.context import WorkflowContext
from tests.support import reward_functions as functions
from tests.support.engine.embedded import fresh_logprobs
from tests.support.errors import fails_with
from tests.support.other_weights import publish_other
from tests.support.proxy import until

SAMPLING = GenerationHyperparameters(max_new_tokens=24, temperature=0.8)
ITEM: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 2 + 2?"}],
    "answer": "2 + 2",
    # A dataset's own column of this name gives way to what was really asked.
    "prompt": "another text",
}


@pytest.fixture(scope="module", autouse=True)
def _processes() -> Iterator[None]:
    yield
    workers.shared_pool("rewards", 1).close()


@pytest.fixture
async def pool(engine_url: str, chat: ChatFormat) -> AsyncIterator[EnginePool]:
    async with EnginePool([engine_url], decode=chat.decode) as pool:
        yield pool


def worst(models: list[Any], result: dict[str, torch.Tensor], temperature: float) -> float:
    """The largest difference to a fresh pass of the weights of each token's version."""
    difference = 0.0
    for row, told in rows_of(result):
        assert told == pytest.approx(temperature)
        ids, trained, versions = row["input_ids"].tolist(), row["loss_mask"] == 1, row["versions"]
        assert ((versions >= 0) == trained).all()
        for version in set(versions[trained].tolist()):
            fresh = fresh_logprobs(models[version], ids[:1], ids[1:], temperature)
            gap = (fresh - torch.tensor(row["logprobs"])[1:])[versions[1:] == version]
            difference = max(difference, gap.abs().max().item())
    return difference


async def test_rlvr_returns_what_was_sampled_with_its_reward(
    pool: EnginePool, embedded: EmbeddedEngine, chat: ChatFormat, tiny_model_dir: Path
) -> None:
    workflow = RLVRWorkflow(
        "tests.support.reward_functions.documented", SAMPLING, str(tiny_model_dir)
    )
    stats_tracker.export_all()
    result = checked_tensors(await workflow.arun_episode(pool, ITEM))
    ((row, _),) = rows_of(result)
    prompt = chat.render(ITEM["messages"], None)
    assert row["input_ids"][: len(prompt)].tolist() == prompt
    output = row["input_ids"][len(prompt) :].tolist()
    assert row["loss_mask"].tolist() == [0] * len(prompt) + [1] * len(output)
    text = chat.decode(output[:-1] if output[-1] in chat.stop_token_ids else output)
    assert float(row["rewards"]) == len(text)
    assert worst([embedded.loaded.model], result, 0.8) < 1e-3
    assert stats_tracker.export_all()["rollout/reward"] == len(text)


async def test_a_workflow_uses_its_own_function_for_prompts(
    pool: EnginePool, chat: ChatFormat, tiny_model_dir: Path
) -> None:
    from transformers import AutoTokenizer

    def ids_of(prompt: Any, tokenizer: Any, enable_thinking: bool) -> list[int]:
        assert not enable_thinking
        return list(tokenizer.encode(prompt["text"]))

    workflow = RLVRWorkflow(
        functions.digits,
        SAMPLING,
        AutoTokenizer.from_pretrained(tiny_model_dir),
        get_input_ids_fn=ids_of,
        data_extract_prompt_fn=lambda data: data["question"],
    )
    result = await workflow.arun_episode(pool, {"question": {"text": "2 + 2 ="}})
    ids = chat.encode("2 + 2 =", special=True)
    assert result["input_ids"][0, : len(ids)].tolist() == ids


async def test_turns_go_on_exactly_across_weight_updates(
    pool: EnginePool,
    embedded: EmbeddedEngine,
    chat: ChatFormat,
    tiny_model_dir: Path,
    tmp_path: Path,
) -> None:
    paths = [tiny_model_dir, *(publish_other(tiny_model_dir, tmp_path, v) for v in (1, 2))]
    models = [load_model(str(path)).model for path in paths]
    workflow = MultiTurnWorkflow(functions.never, SAMPLING, chat, max_turns=4, turn_discount=0.5)
    episodes = [asyncio.create_task(workflow.arun_episode(pool, ITEM)) for _ in range(8)]
    for version in (1, 2):
        # Amid the turns, of which each takes about as many steps as it has tokens.
        await until(lambda: embedded.loop.steps >= 20 * version)  # noqa: B023
        await pool.hold()
        await embedded.pause("abort")
        await embedded.update_weights(str(paths[version]), str(version))
        await embedded.resume()
        pool.release(version)
    results = [checked_tensors(result) for result in await asyncio.gather(*episodes)]
    versions = set()
    rows = 0
    for result in results:
        assert worst(models, result, 0.8) < 1e-3
        versions |= set(result["versions"].flatten().tolist()) - {-1}
        rows += len(result["input_ids"])
        begins = [np.diff(row["loss_mask"], prepend=0) > 0 for row, _ in rows_of(result)]
        assert np.concatenate(begins).sum() == 4, "turns"
        text = chat.decode(result["input_ids"][-1].tolist())
        assert text.count(FEEDBACK[:40]) == 3
    assert rows == 8 + workflow.branches
    assert rows < 16, "a random model often ends in the middle of something; others go on exactly"
    assert len(versions) > 1


class Says:
    """An engine that answers what it is told to."""

    version = 0

    def __init__(self, chat: ChatFormat, *answers: str) -> None:
        self._answers = [[*chat.encode(a, special=False), chat.stop_token_ids[0]] for a in answers]
        self.requests: list[ModelRequest] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        ids = self._answers[len(self.requests)]
        self.requests.append(request)
        prompt = [int(i) for i in request.input_ids]
        return ModelResponse(prompt, ids, [-1.0] * len(ids), [0] * len(ids), "stop")


async def test_a_later_right_answer_is_worth_less(chat: ChatFormat) -> None:
    engine: Any = Says(chat, "four", "vier", "4")
    workflow = MultiTurnWorkflow(functions.digits, SAMPLING, chat, max_turns=5, turn_discount=0.5)
    stats_tracker.export_all()
    result = await workflow.arun_episode(engine, ITEM)
    assert result["rewards"].tolist() == [0.25]
    told = stats_tracker.export_all()
    assert (told["rollout/reward"], told["rollout/num_turns"]) == (0.25, 3)
    assert len({request.rid for request in engine.requests}) == 1, "one engine has the beginning"
    first, second, third = [list(request.input_ids) for request in engine.requests]
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    # What follows the first prompt is what the template writes there.
    said = [{"role": "assistant", "content": "four"}, {"role": "user", "content": FEEDBACK}]
    whole = chat.render([*ITEM["messages"], *said], None)
    assert second[len(first) :] == whole[len(first) - len(second) :]
    assert result["input_ids"].shape == (1, len(third) + 2)


async def test_a_context_that_is_full_ends_the_turns(pool: EnginePool, chat: ChatFormat) -> None:
    length = await pool.context_length()
    long = SAMPLING.new(max_new_tokens=10**6, ignore_eos=True, stop_token_ids=())
    workflow = MultiTurnWorkflow(functions.never, long, chat, max_turns=3, turn_discount=1.0)
    item = {**ITEM, "messages": [{"role": "user", "content": "word " * (length // 4)}]}
    prompt = len(chat.render(item["messages"], None))
    assert prompt < length
    result = await workflow.arun_episode(pool, item)
    assert 0 < result["loss_mask"].sum() <= length - prompt
    item["messages"] = [{"role": "user", "content": "many words " * length}]
    with pytest.raises(ContextLengthExceeded):
        await workflow.arun_episode(pool, item)


async def test_what_cannot_be_trained_on_is_sampled_in_evaluations_only(
    pool: EnginePool, chat: ChatFormat
) -> None:
    workflow = RLVRWorkflow(functions.digits, SAMPLING.new(temperature=0.0, top_p=0.5), chat)
    with fails_with(ConfigError, "truncated_sampling"):
        await workflow.arun_episode(pool, ITEM)
    stats_tracker.export_all()
    with context.use(WorkflowContext(is_eval=True)):
        first, second = [await workflow.arun_episode(pool, ITEM) for _ in range(2)]
    assert first["input_ids"].tolist() == second["input_ids"].tolist()
    assert "eval-rollout/reward" in stats_tracker.export_all()
    with context.use(WorkflowContext(is_eval=True, temperature=0.7)):
        (row,) = rows_of(await workflow.arun_episode(pool, ITEM))
    assert row[1] == pytest.approx(0.7), "an evaluation may have a temperature of its own"


async def test_the_runs_sampling_is_used_where_none_is_given(
    pool: EnginePool, chat: ChatFormat
) -> None:
    workflow = RLVRWorkflow(functions.digits, None, chat)
    with fails_with(ConfigError, "gconfig"):
        await workflow.arun_episode(pool, ITEM)
    sampling = SAMPLING.new(max_new_tokens=3)
    with context.use(WorkflowContext(sampling=sampling)):
        ((row, temperature),) = rows_of(await workflow.arun_episode(pool, ITEM))
    assert temperature == pytest.approx(sampling.temperature)
    assert 1 <= row["loss_mask"].sum() <= 3


async def test_bad_items_rewards_and_arguments_are_refused_by_name(
    pool: EnginePool, chat: ChatFormat
) -> None:
    unanswered = {"messages": ITEM["messages"]}
    for function, item, error, names in (
        (functions.digits, {"question": "?", "answer": "4"}, ConfigError, ["'messages'", "answer"]),
        (functions.words, ITEM, ConfigError, ["'very good'"]),
        (functions.documented, unanswered, RewardFailed, ["KeyError: 'answer'"]),
    ):
        with fails_with(error, *names):
            await RLVRWorkflow(function, SAMPLING, chat).arun_episode(pool, item)
    for name, text in (
        ("tests.no_such.reward", "tests.no_such.reward"),
        ("digits", "module.function"),
        ("tests.support.reward_functions", "functions.function_name"),
        ("tests.support.reward_functions.digit", "functions.digits"),
        ("tests.support.reward_functions.__name__", "reward_fn"),
    ):
        with fails_with(ConfigError, text):
            RLVRWorkflow(name, SAMPLING, chat)
    for name, turns, discount in (("max_turns", 0, 1.0), ("turn_discount", 1, 0.0)):
        with fails_with(ConfigError, name):
            MultiTurnWorkflow(functions.digits, SAMPLING, chat, turns, discount)
