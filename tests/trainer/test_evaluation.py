"""What an evaluation finds, when it is made, and what it leaves behind."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from any_agent import stats_tracker, workflow_context
from any_agent.config import Config, EvalConfig
from any_agent.data import as_dataset
from any_agent.launcher.training_progress import TrainingProgress, format_evaluation
from any_agent.rollout import WorkflowExecutor
from any_agent.rundir.layout import RunDir
from any_agent.runtime.disk_space import DiskSpace
from any_agent.runtime.log_tail import records_in
from any_agent.types import GenerationHyperparameters
from any_agent.workflow import RolloutWorkflow
from tests.support.trainer.datasets import Alternating, DataLab
from tests.support.trainer.loop import config_of
from tests.support.workflow.tensors import tensors
from tests.support.workflow_executor import REJECT, Doing, Gated, executor, items, until
from trainer.batch_source import DatasetBatches
from trainer.evaluation import TrialEvaluation, figures, score
from trainer.metrics import TrainerMetrics
from trainer.report import RunReport


class Lab:
    """Evaluations of one run, and what they tell."""

    def __init__(self, folder: Path, executor: WorkflowExecutor) -> None:
        config = Config(root=folder)
        run_dir = RunDir.of(config.root, config.user, config.experiment, config.trial)
        run_dir.path.mkdir(parents=True, exist_ok=True)
        self.metrics = run_dir.metrics
        self.executor = executor
        self.report = RunReport(config, run_dir, DiskSpace(), cast(Any, None), print)

    def evaluation(
        self, workflow: RolloutWorkflow, count: int = 4, **settings: Any
    ) -> TrialEvaluation:
        config = EvalConfig(**({"every": 2} | settings))
        dataset = as_dataset(items(count), "valid_dataset")
        return TrialEvaluation(config, dataset, workflow, lambda: self.executor, self.report)

    @property
    def said(self) -> list[str]:
        return [format_evaluation(line) for line in self.lines]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [line for line in records_in(self.metrics) if "eval" in line]

    @property
    def found(self) -> list[dict[str, Any]]:
        return [line["eval"] for line in self.lines]


@contextmanager
def evaluating(folder: Path, **settings: Any) -> Iterator[Lab]:
    with executor(**settings) as running:
        yield Lab(folder, running)


def by_item(reward: dict[int, Any]) -> Doing:
    """Rewards by item; an exception is raised, REJECT rejects."""

    def do(data: dict[str, Any]) -> Any:
        found = reward[data["n"]]
        return tensors([1, 2, data["n"]], reward=found) if isinstance(found, float) else found

    return Doing(do)


def test_evaluations_are_made_at_the_steps_that_the_settings_name(tmp_path: Path) -> None:
    for number, (settings, due) in enumerate(
        (
            ({"every": 0}, []),
            ({"every": 0, "at_start": True}, [0]),
            ({"every": 2}, [2, 4, 5]),
            ({"every": 3, "at_start": True}, [0, 3, 5]),
            ({"every": 100}, [5]),
        )
    ):
        with evaluating(tmp_path / str(number)) as lab:
            evaluation = lab.evaluation(Doing(), 1, **settings)
            for step in range(6):
                evaluation(step, step == 5)
            assert [line["step"] for line in lab.lines] == due, settings


def test_an_evaluation_has_means_and_counts_failures(tmp_path: Path) -> None:
    workflow = by_item({0: 1.0, 1: 0.0, 2: ZeroDivisionError("no"), 3: REJECT, 4: 1.0})
    with evaluating(tmp_path) as lab:
        lab.evaluation(workflow, 5, group_size=2)(4, False)
        assert lab.executor.rejected == {}, "nothing of it is trained on"
        assert lab.executor.capacity.admitted == 0
        lab.evaluation(by_item(dict.fromkeys(range(2), KeyError("answer"))), 2)(6, False)
    found, nothing = lab.found
    assert (nothing["reward"], nothing["ci95"], nothing["failed"]) == (None, None, {"failed": 2})
    assert (lab.lines[0]["step"], lab.lines[0]["version"]) == (4, 0)
    assert found["reward"] == pytest.approx(2 / 3)
    assert (found["items"], found["episodes"]) == (3, 6)
    assert found["failed"] == {"failed": 2, "returned_none": 2}
    assert found["ci95"] == [0.0, 1.0], "Student's -0.768 to 2.101, cut where all rewards lie"
    assert "reward 0.667  95 % in 0.000 to 1.000" in lab.said[0]
    assert "left out 2 (failed)  left out 2 (returned_none)" in lab.said[0]
    assert "no reward" in lab.said[1]


def test_figures_average_each_item_first_over_its_own_runs() -> None:
    found = figures([[1.0, 0.0], [1.0, 1.0], [], [0.5]], Counter(failed=2))
    assert found["reward"] == pytest.approx((0.5 + 1 + 0.5) / 3)
    assert found["best"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert figures([[1.0], []], Counter())["ci95"] is None
    nothing = figures([], Counter())
    assert (nothing["reward"], nothing["best"]) == (None, None)


def test_the_score_of_a_run_is_that_of_training() -> None:
    two = tensors([1, 2, 3], [1, 2, 4, 5])
    two["rewards"][0], two["rewards"][1] = 1.0, 0.5
    assert score(two) == 0.75
    # A row of which nothing was sampled has no part in it.
    two["loss_mask"][1] = 0
    assert score(two) == 1.0


def test_workflows_know_that_they_are_evaluated(tmp_path: Path) -> None:
    seen = []

    def do(data: dict[str, Any]) -> None:
        seen.append((workflow_context.get().task_id, workflow_context.stat_scope()))
        stats_tracker.get(workflow_context.stat_scope()).scalar(length=data["n"])

    workflow = Doing(do)
    sampling = GenerationHyperparameters(temperature=0.25)
    stats_tracker.get("eval-rollout").scalar(length=1000)
    with evaluating(tmp_path, options={"eval_sampling": sampling}) as lab:
        lab.evaluation(workflow, 3)(2, False)
    assert sorted(seen) == [(n, "eval-rollout") for n in range(3)]
    assert {context.temperature for context in workflow.seen} == {0.25}
    stats = lab.found[0]["stats"]
    assert stats["eval-rollout/length"] == 1.0, "figures from before are none of its own"
    assert not [name for name in stats if name.endswith("__count")]


def test_episodes_that_take_too_long_are_cancelled_and_counted_as_timeouts(tmp_path: Path) -> None:
    workflow = Gated()
    with evaluating(tmp_path, max_concurrent=2) as lab:
        threading.Timer(0.05, workflow.let, [0]).start()
        lab.evaluation(workflow, 4, timeout=1.5)(2, False)
        assert workflow.cancelled == [1, 2]
        lab.evaluation(by_item(dict.fromkeys(range(4), 1.0)), 4)(4, False)
    late, again = lab.found
    assert (late["failed"], late["reward"], again["episodes"]) == ({"timeout": 3}, 1.0, 4)


def test_a_step_is_not_evaluated_twice(tmp_path: Path) -> None:
    with evaluating(tmp_path) as lab:
        first = lab.evaluation(Doing())
        first(2, False)
        first(2, True)
        lab.metrics.write_text(
            lab.metrics.read_text() + '{"step": 4, "reward": 1.0}\n{"step": 4, "eval": {"rew'
        )
        second = lab.evaluation(Doing())
        second(2, False)
        assert len(lab.lines) == 1
        second(4, False)
        assert len(lab.lines) == 2


def test_an_interrupt_ends_an_evaluation(tmp_path: Path) -> None:
    workflow = Gated()
    with evaluating(tmp_path) as lab, ThreadPoolExecutor(1) as threads:
        evaluation = lab.evaluation(workflow)
        running = threads.submit(evaluation, 2, False)
        until(lambda: workflow.waiting)
        evaluation.interrupt()
        with pytest.raises(InterruptedError):
            running.result(60)
        with pytest.raises(InterruptedError):
            evaluation(4, False)
    assert not lab.metrics.exists()


def test_an_evaluation_is_exported_as_metrics_and_printed(tmp_path: Path) -> None:
    with evaluating(tmp_path) as lab:
        progress = TrainingProgress(lab.metrics, 10)
        lab.evaluation(by_item({0: 1.0, 1: 0.0, 2: RuntimeError("x")}), 3)(2, False)
    assert progress.new_lines() == lab.said
    metrics = TrainerMetrics(dict)
    metrics.record_evaluation(lab.lines[0])
    text = metrics.exposition().render().decode()
    assert "any_agent_eval_step 2" in text
    assert "any_agent_eval_reward_mean 0.5" in text
    assert 'any_agent_eval_episodes_total{outcome="failed"} 1' in text
    assert 'any_agent_eval_reward_ci95{bound="low"} 0.0' in text


@pytest.mark.parametrize("stop_after", [None, 3])
def test_a_run_is_evaluated_between_its_steps(settings: list[str], stop_after: int | None) -> None:
    """Steps 0, 2 and 4 are evaluated between two steps, with their weights, and 5 because it is
    the last; a run that goes on does none of them again."""
    settings += ["rollout.eta=1", "rollout.batch_size=4", "rollout.max_concurrent=4"]
    lab: DataLab | None = None
    for steps in [5] if stop_after is None else [stop_after, 5]:
        config = config_of(settings, f"train.steps={steps}", "sessions.group_size=2")
        lab = DataLab(config, items=12, before=lab)
        ended = ExitStack()
        lab.trainer.evaluate = TrialEvaluation(
            EvalConfig(every=2, at_start=True),  # type: ignore[call-arg]
            as_dataset(items(3), "valid_dataset"),
            Alternating(),
            partial(executor_of, config, lab.source, ended),
            lab.trainer.report,
        )
        with ended:
            assert lab.trainer.train()
    assert lab is not None
    order = [("eval" if "eval" in line else "step", line["step"]) for line in lab.metrics]
    expected = [("eval", 0), ("step", 1), ("step", 2), ("eval", 2), ("step", 3)]
    expected += [("eval", 3)] if stop_after else []
    expected += [("step", 4), ("eval", 4), ("step", 5), ("eval", 5)]
    assert order == expected
    for line in lab.metrics:
        if "eval" in line:
            assert line["eval"]["items"] == 3
            assert stop_after or line["step"] == 5 or line["version"] == line["step"]


def executor_of(config: Config, source: DatasetBatches, ended: ExitStack) -> WorkflowExecutor:
    """The trainer's executor, or a fresh one after its end."""
    if source.started:
        executor: WorkflowExecutor = source.executor
        return executor
    return ended.enter_context(WorkflowExecutor(None, config.rollout))
