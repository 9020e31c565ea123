"""The workflows of AReaL's references run as they are written there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from any_agent import GenerationHyperparameters, load_hf_tokenizer, stats_tracker
from any_agent.config import RolloutConfig
from any_agent.engine import EnginePool
from any_agent.rollout import WorkflowExecutor
from tests.areal.calculator import calculator
from tests.areal.training import DOCUMENTS

TASK = {
    "messages": [{"role": "user", "content": "What is 2 and 3?"}],
    "prompt": "What is 2 and 3?",
    "answer": "5",
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_hf_tokenizer(str(tiny_model_dir))


@pytest.fixture(scope="module")
def executor(tiny_model_dir: Path, tokenizer: Any) -> Iterator[WorkflowExecutor]:
    """An engine whose model is right and wrong in turn."""
    config = RolloutConfig()  # type: ignore[call-arg]
    with (
        calculator(tiny_model_dir) as engine,
        WorkflowExecutor(EnginePool([engine.url], decode=tokenizer.decode), config) as executor,
    ):
        yield executor


@pytest.fixture(autouse=True)
def documents(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their folder is where the scripts that name them lie."""
    monkeypatch.syspath_prepend(str(DOCUMENTS))
    yield
    sys.modules.pop("my_workflow", None)


def run(executor: WorkflowExecutor, name: str, data: Any = TASK, **more: Any) -> Any:
    executor.submit(data, f"my_workflow.{name}", **more)
    (result,) = executor.wait(1, timeout=60)
    return result


def test_the_direct_approach(executor: WorkflowExecutor, tokenizer: Any) -> None:
    kwargs = {"tokenizer": tokenizer}
    got = run(executor, "MyDirectWorkflow", workflow_kwargs=kwargs, group_size=2)
    assert sorted(got["rewards"].tolist()) == [0.0, 1.0]
    assert got["input_ids"].shape == got["logprobs"].shape == got["versions"].shape
    assert got["loss_mask"].sum(1).tolist() == [2, 2], "a digit and the end of the turn"


def test_a_workflow_of_ones_own(executor: WorkflowExecutor, tokenizer: Any) -> None:
    kwargs = {"tokenizer": tokenizer, "gconfig": GenerationHyperparameters(max_new_tokens=8)}
    got = run(executor, "MyWorkflow", workflow_kwargs=kwargs, group_size=4)
    assert sorted(got["rewards"].tolist()) == [0.0, 0.0, 1.0, 1.0]
    ids = got["input_ids"][0][got["loss_mask"][0].bool()].tolist()
    assert tokenizer.decode(ids, skip_special_tokens=True) in ("5", "6")
    rejected = run(executor, "MyWorkflow", TASK | {"prompt": "2 and 3"}, workflow_kwargs=kwargs)
    assert rejected is None


def test_the_example_of_a_returned_value(executor: WorkflowExecutor) -> None:
    got = run(executor, "ExampleReturn", group_size=4)
    assert got["input_ids"].tolist() == [[1, 2, 3, 4, 5]] * 4
    assert got["rewards"].tolist() == [1.0] * 4
    assert got["versions"].tolist() == [[0, 0, 1, 1, 1]] * 4


@pytest.mark.parametrize(("is_eval", "scope"), [(False, "rollout"), (True, "eval-rollout")])
def test_the_context_and_its_figures(
    executor: WorkflowExecutor, is_eval: bool, scope: str, documents: None
) -> None:
    from my_workflow import InContext  # type: ignore[import-not-found]

    stats_tracker.export_all()
    workflow = InContext()
    number = executor.submit({"reward": 0.25}, workflow, is_eval=is_eval)
    executor.wait_for_task(number, timeout=60)
    assert workflow.seen == [(number, is_eval, scope)]
    assert stats_tracker.get(scope).export()[f"{scope}/reward"] == 0.25
