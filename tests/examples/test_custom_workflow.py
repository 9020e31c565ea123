"""What the workflow of `examples/custom_workflow` trains on, and what not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from any_agent import GenerationHyperparameters, ModelRequest, ModelResponse, load_hf_tokenizer
from any_agent.types import StopReason
from examples.custom_workflow.workflow import CONCLUDES, BudgetedThinking

ITEM = {"question": "What is 3 + 4?", "answer": "7"}


class Engine:
    """Says these texts, one a request."""

    def __init__(self, tokenizer: Any, *says: tuple[str, StopReason]) -> None:
        self.asked: list[ModelRequest] = []
        self._tokenizer = tokenizer
        self._says = list(says)

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.asked.append(request)
        text, reason = self._says.pop(0)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        n, asked = len(ids), list(request.input_ids)
        return ModelResponse(asked, ids, [-0.5] * n, [3] * n, reason)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_hf_tokenizer(str(tiny_model_dir))


async def episode(tokenizer: Any, engine: Any) -> dict[str, Any]:
    gconfig = GenerationHyperparameters(max_new_tokens=100)
    row = await BudgetedThinking(tokenizer, gconfig, budget=9).arun_episode(engine, ITEM)
    assert row is not None
    return {name: tensor[0].tolist() for name, tensor in row.items()}


async def test_what_is_written_for_the_model_is_not_trained_on(tokenizer: Any) -> None:
    engine = Engine(tokenizer, ("Hm, let me see", "length"), ("7<|im_end|>", "stop"))
    row = await episode(tokenizer, engine)
    first, second = engine.asked
    written = tokenizer.encode(CONCLUDES, add_special_tokens=False)
    prompt, thoughts = len(first.input_ids), len(second.input_ids) - len(written)
    assert second.input_ids[thoughts:] == written
    assert (first.gconfig.max_new_tokens, second.gconfig.max_new_tokens) == (9, 16)
    trained = [t for t, mask in enumerate(row["loss_mask"]) if mask]
    end = len(second.input_ids)
    assert trained == [*range(prompt, thoughts), *range(end, len(row["input_ids"]))]
    assert [row["versions"][t] for t in trained] == [3] * len(trained)
    assert all(row["logprobs"][t] == (-0.5 if t in trained else 0) for t in range(end))
    assert row["rewards"] == 1.0


async def test_an_answer_within_the_budget_is_one_request(tokenizer: Any) -> None:
    engine = Engine(tokenizer, (f"Hm. {CONCLUDES}8<|im_end|>", "stop"))
    row = await episode(tokenizer, engine)
    assert len(engine.asked) == 1
    prompt = len(engine.asked[0].input_ids)
    assert row["loss_mask"] == [0] * prompt + [1] * (len(row["input_ids"]) - prompt)
    assert row["rewards"] == 0.0


async def test_an_answer_that_has_begun_is_continued_as_it_is(tokenizer: Any) -> None:
    engine = Engine(tokenizer, (f"Hm. {CONCLUDES}", "length"), ("7<|im_end|>", "stop"))
    row = await episode(tokenizer, engine)
    first, second = engine.asked
    said = tokenizer.encode(f"Hm. {CONCLUDES}", add_special_tokens=False)
    assert second.input_ids == [*first.input_ids, *said], "nothing is written twice"
    assert row["rewards"] == 1.0
