"""What a script calls: it starts and ends what it must, and says at once what cannot be."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from any_agent.config import Config, load_config
from any_agent.config.script import GRPOConfig
from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.trial import SavedWeights
from any_agent.rundir.layout import RunDir
from any_agent.workflow import RolloutWorkflow
from tests.support.errors import fails_with
from trainer import GRPOTrainer, grpo_trainer
from trainer.signals import StopRequested

LIMIT = 60.0


class FakeService:
    """Started and stopped as told."""

    made: FakeService

    def __init__(
        self, config: Config, *, say: Any, failed: Callable[[BaseException], None]
    ) -> None:
        url = "http://127.0.0.1:1"
        self.node = SimpleNamespace(url=url, local_url=url, engine_urls=("http://127.0.0.1:2",))
        self.error: BaseException | None = None
        self.calls: list[str] = []
        self._failed = failed
        FakeService.made = self
        RunDir.of(config.root, config.user, config.experiment, config.trial).create()

    def start(self) -> None:
        self.calls.append("start")

    def stop(self, *, drain: bool = False) -> None:
        self.calls.append("drain" if drain else "stop")

    def fail(self, error: BaseException) -> None:
        """As it does in its own thread."""
        self.error = error
        threading.Thread(target=self._failed, args=(error,)).start()


class FakeLoop:
    """Trains until it is told to stop; ``then`` is what happens as soon as it trains."""

    then: Callable[[], None]
    made: FakeLoop

    def __init__(self, config: Config, **settings: Any) -> None:
        self.metrics = SimpleNamespace(record_evaluation=None)
        self.evaluate = self.heartbeat = nullcontext
        self.ended = threading.Event()
        self.report = None
        FakeLoop.made = self

    def train(self) -> bool:
        FakeLoop.then()
        assert self.ended.wait(LIMIT)
        return False

    def stop(self) -> None:
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        """Too busy to notice."""


@pytest.fixture
def config(tmp_path: Path, tiny_model_dir: Path) -> Config:
    return load_config(None, [f"root={tmp_path}", f"model.path={tiny_model_dir}"], environ={})


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(grpo_trainer, "LocalService", FakeService)
    monkeypatch.setattr(grpo_trainer, "TrainingLoop", FakeLoop)
    FakeLoop.then = lambda: FakeLoop.made.stop()
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


class Nothing(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        return None


def test_a_process_that_follows_another_starts_no_service(
    config: Config, fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SimpleNamespace(leads=False)
    followed: list[object] = []
    monkeypatch.setattr(grpo_trainer, "join_processes", lambda train: world)
    monkeypatch.setattr(grpo_trainer, "follow", lambda world, train: followed.append(world))
    with GRPOTrainer(config) as led:
        assert led.url == ""
        assert led.train() and led.train()
    assert followed == [world]
    assert FakeService.made.calls == []


def changed(config: Config, *settings: str) -> Config:
    own = [f"root={config.root}", f"model.path={config.model.path}"]
    return load_config(None, [*own, *settings], environ={})


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("processes=2", "torchrun --nproc-per-node 2"),
        ("advantage_estimator=gppo", "gppo"),
        ("loss=gppo", "gppo"),
        ("lora.target_modules=q_proj,nothing", "no layer named nothing"),
        ("epochs=2", "train.epochs=2"),
        ("device=cuda", "train.device=cuda"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_starts(
    config: Config, fakes: None, monkeypatch: pytest.MonkeyPatch, setting: str, said: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with fails_with(ConfigError, said), GRPOTrainer(changed(config, f"train.{setting}")):
        pass
    assert "start" not in FakeService.made.calls


@pytest.mark.parametrize(
    ("dataset", "arguments", "said"),
    [
        (None, {"workflow": Nothing}, "train_dataset"),
        ([{"n": 1}], {}, "no workflow"),
        ([{"n": 1}], {"workflow": "no_such_module.Agent"}, "'no_such_module'"),
        ([{"n": 1}], {"workflow": "json.JSONDecoder"}, "run method"),
        ([{"n": 1}], {"workflow": Nothing, "workflow_kwargs": {"x": 1}}, "workflow_kwargs"),
        ([{"n": 1}], {"workflow": Nothing, "eval_workflow": "json.nothing"}, "'nothing'"),
        ([{"n": 1}], {"workflow": Nothing, "eval.every": 5}, "valid_dataset"),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_model_loads(
    config: Config, fakes: None, dataset: Any, arguments: dict[str, Any], said: str
) -> None:
    """And before the service is started for a dataset."""
    given = changed(config, f"eval.every={arguments.pop('eval.every', 0)}")
    with fails_with(ConfigError, said), GRPOTrainer(given, train_dataset=dataset) as trainer:
        trainer.train(**arguments)
    assert FakeService.made.calls == (["start", "stop"] if dataset is None else ["stop"])


def test_the_service_starts_at_once_without_a_dataset_and_else_when_asked_for(
    config: Config, fakes: None
) -> None:
    with GRPOTrainer(config):
        assert FakeService.made.calls == ["start"]
    said: list[str] = []
    # Layers that the model has, and epochs of a dataset, are accepted.
    given = changed(config, "train.lora.target_modules=q_proj", "train.epochs=2")
    with GRPOTrainer(given, train_dataset=[{"n": 1}], say=said.append) as trainer:
        assert FakeService.made.calls == []
        assert trainer.url == trainer.url == "http://127.0.0.1:1"
        assert FakeService.made.calls == ["start"]
    line, dashboard = said
    assert dashboard == "dashboard http://127.0.0.1:1/ui" and line.endswith("http://127.0.0.1:1")


def test_data_that_cannot_be_trained_on_is_refused_before_the_service_starts(
    config: Config,
) -> None:
    for given, names in (
        (("my.yaml",), ["a str"]),
        ((config, []), ["train_dataset"]),
        ((config, [{"n": 1}, "text"]), ["train_dataset[1]", "str"]),
        ((config, [{"n": 1}], ((1, 2),)), ["valid_dataset[0]", "tuple"]),
    ):
        with fails_with(ConfigError, *names):
            GRPOTrainer(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "code", "end"), [(signal.SIGINT, 130, "stop"), (signal.SIGTERM, 143, "drain")]
)
def test_a_trainer_that_is_stopped_names_its_checkpoint_and_how_to_go_on(
    config: Config, fakes: None, monkeypatch: pytest.MonkeyPatch, number: int, code: int, end: str
) -> None:
    FakeLoop.then = lambda: signal.raise_signal(number)
    saved = SavedWeights(Path("/runs/step-00000007"), 7, 7)
    for checkpoint, named in ((saved, "/runs/step-00000007"), (None, "no checkpoint")):
        monkeypatch.setattr(grpo_trainer, "latest_weights", lambda _: checkpoint)  # noqa: B023
        said: list[str] = []
        trainer = GRPOTrainer(config, train_dataset=[{"n": 1}], say=said.append)
        with fails_with(StopRequested, code=code), trainer:
            trainer.train(workflow=Nothing)
        assert FakeService.made.calls == ["start", end]
        assert len(said) == 4 and said[3].endswith(shlex.join(sys.orig_argv)), "what was typed"
        assert named in said[3]


def test_a_service_that_is_gone_ends_training_whatever_it_is_at(
    config: Config, fakes: None
) -> None:
    trainer = GRPOTrainer(config, train_dataset=[{"n": 1}])
    FakeLoop.then = lambda: FakeService.made.fail(StartupError("engine 0 ended 6 times"))
    with fails_with(StartupError, "engine 0"), trainer:
        trainer.train(workflow=Nothing)
    assert FakeService.made.calls == ["start", "stop"]


def test_another_model_is_not_trained_under_the_same_name(
    config: Config, fakes: None, tmp_path: Path
) -> None:
    folder = GRPOTrainer(config).dir.path
    (folder / "format").write_text("2\n")
    (folder / "config.yaml").write_text(f"root: {tmp_path}\nmodel:\n  path: /another\n")
    with fails_with(ConfigError, "/another"), GRPOTrainer(config) as trainer:
        trainer.train()


class Numbered(Nothing):
    def __init__(self, x: int = 0) -> None:
        self.x = x


@pytest.fixture
def resolved(fakes: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The workflows that are trained and evaluated; training ends at once."""
    found: list[Any] = []

    def note(config: Any, dataset: Any, workflow: Any, *_: Any) -> None:
        found.append(workflow)

    monkeypatch.setattr(grpo_trainer, "DatasetBatches", note)
    monkeypatch.setattr(grpo_trainer, "TrialEvaluation", note)
    return found


@pytest.mark.parametrize(
    ("kwargs", "evaluated", "eval_kwargs", "x"),
    [
        ({"x": 1}, None, None, 1),
        ({"x": 1}, None, {"x": 2}, 2),
        ({"x": 1}, Numbered, None, 0),
        (None, Numbered, None, 0),
        (None, Numbered, {"x": 3}, 3),
    ],
)
def test_evaluations_use_the_workflow_and_arguments_that_they_are_given(
    config: Config, resolved: list[Any], kwargs: Any, evaluated: Any, eval_kwargs: Any, x: int
) -> None:
    with GRPOTrainer(changed(config, "eval.every=1"), [{"n": 1}], [{"n": 2}]) as trainer:
        trainer.train(Numbered, evaluated, kwargs, eval_kwargs)
    runs, eval_runs = resolved
    assert isinstance(eval_runs, Numbered) and eval_runs.x == x
    # The workflow that is trained, where that is the same.
    assert (runs is eval_runs) == (runs.x == x)


def test_what_is_trained_may_be_named_by_the_settings(config: Config, resolved: list[Any]) -> None:
    def named(**settings: str) -> GRPOConfig:
        return GRPOConfig.model_validate({**dict(config), **settings})

    name = f"{__name__}.Nothing"
    with GRPOTrainer(named(workflow=name)) as trainer, fails_with(ConfigError, "train_dataset"):
        trainer.train()
    with (
        GRPOTrainer(named(workflow=name, eval_workflow="x.y"), train_dataset=[{}]) as trainer,
        fails_with(ConfigError, "'x'"),
    ):
        trainer.train()
    assert resolved == []
    with GRPOTrainer(named(workflow=name), train_dataset=[{}]) as trainer:
        for given in (None, name, Nothing):
            trainer.train(workflow=given)
            assert isinstance(resolved.pop(), Nothing)
        with fails_with(ConfigError, "workflow=other.Agent"):
            trainer.train(workflow="other.Agent")
