"""What a script calls: it starts and ends what it must, and says at once what cannot be."""

from __future__ import annotations

import re
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

import trainer
from any_agent.config import Config, load_config
from any_agent.config.script import GRPOConfig
from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.trial import SavedWeights
from any_agent.workflow import RolloutWorkflow
from tests.support.errors import fails_with
from trainer import GRPOTrainer, grpo_trainer
from trainer.loop import TrainingLoop
from trainer.signals import StopRequested

LIMIT = 60.0


class FakeService:
    """Started and stopped as told."""

    def __init__(
        self, config: Config, *, say: Any, failed: Callable[[BaseException], None]
    ) -> None:
        url = "http://127.0.0.1:1"
        self.node = SimpleNamespace(url=url, local_url=url, engine_urls=("http://127.0.0.1:2",))
        self.error: BaseException | None = None
        self.calls: list[str] = []
        self._failed = failed
        (Path(config.root) / config.user / config.experiment / config.trial / "logs").mkdir(
            parents=True, exist_ok=True
        )

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
        self.source = settings["source"]
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
    FakeLoop.then = lambda: None
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


class Nothing(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
        return None


def service_of(trainer: GRPOTrainer) -> Any:
    return trainer._service


def test_both_names_are_one_trainer() -> None:
    assert trainer.PPOTrainer is trainer.GRPOTrainer


def test_a_process_that_is_led_starts_nothing_and_follows_once(
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
    assert service_of(led).calls == []


def test_more_processes_than_were_started_are_refused(config: Config, fakes: None) -> None:
    several = config.model_copy(update={"train": config.train.model_copy(update={"processes": 2})})
    with fails_with(ConfigError, "torchrun --nproc-per-node 2"), GRPOTrainer(several):
        pass


@pytest.mark.parametrize("setting", ["advantage_estimator", "loss"])
def test_an_unknown_algorithm_is_refused_before_anything_starts(
    config: Config, fakes: None, setting: str
) -> None:
    train = config.train.model_copy(update={setting: "gppo"})
    unknown = config.model_copy(update={"train": train})
    with fails_with(ConfigError, "gppo", "grpo"), GRPOTrainer(unknown):
        pass
    with fails_with(ConfigError, "gppo", "grpo"):
        TrainingLoop(unknown)


@pytest.mark.parametrize(
    ("adapted", "said"),
    [("q_proj,nothing", "no layer named nothing"), ("q_proj", "")],
)
def test_layers_that_the_model_lacks_are_refused_before_anything_starts(
    config: Config, fakes: None, adapted: str, said: str
) -> None:
    own = [f"root={config.root}", f"model.path={config.model.path}"]
    lora = load_config(None, [*own, f"train.lora.target_modules={adapted}"], environ={})
    refused = fails_with(ConfigError, "train.lora.target_modules", said)
    with refused if said else nullcontext(), GRPOTrainer(lora) as trainer:
        pass
    assert said or service_of(trainer).calls


def test_passes_over_a_dataset_need_one(config: Config, fakes: None) -> None:
    train = config.train.model_copy(update={"epochs": 2})
    twice = config.model_copy(update={"train": train})
    with fails_with(ConfigError, "train.epochs=2"), GRPOTrainer(twice):
        pass
    with GRPOTrainer(twice, train_dataset=[{"n": 1}]):
        pass


def test_what_is_no_config() -> None:
    with fails_with(ConfigError, "a str"):
        GRPOTrainer("my.yaml")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dataset", "arguments", "said"),
    [
        (None, {"workflow": Nothing}, "train_dataset"),
        ([{"n": 1}], {}, "no workflow"),
        ([{"n": 1}], {"workflow": "no_such_module.Agent"}, "'no_such_module'"),
        ([{"n": 1}], {"workflow": "json.JSONDecoder"}, "run method"),
        ([{"n": 1}], {"workflow": Nothing, "workflow_kwargs": {"x": 1}}, "workflow_kwargs"),
        ([{"n": 1}], {"workflow": Nothing, "eval_workflow": "json.nothing"}, "'nothing'"),
    ],
)
def test_workflows_that_cannot_be_run_are_refused_before_the_model_loads(
    config: Config, fakes: None, dataset: Any, arguments: dict[str, Any], said: str
) -> None:
    """It is told before the model is loaded, and before the service is started for a dataset."""
    with (
        fails_with(ConfigError, said),
        GRPOTrainer(config, train_dataset=dataset) as trainer,
    ):
        trainer.train(**arguments)
    assert service_of(trainer).calls == (["start", "stop"] if dataset is None else ["stop"])


def test_agents_outside_have_a_service_before_training_begins(config: Config, fakes: None) -> None:
    with GRPOTrainer(config) as trainer:
        assert service_of(trainer).calls == ["start"]


def test_whoever_asks_for_the_url_has_a_service(config: Config, fakes: None) -> None:
    said: list[str] = []
    with GRPOTrainer(config, train_dataset=[{"n": 1}], say=said.append) as trainer:
        assert service_of(trainer).calls == []
        assert trainer.url == trainer.url == "http://127.0.0.1:1"
        assert service_of(trainer).calls == ["start"]
    line, dashboard = said
    assert dashboard == "dashboard http://127.0.0.1:1/ui"
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] INFO: any-agent server listening at "
        r"http://127\.0\.0\.1:1",
        line,
    )


def test_a_gpu_that_is_not_there(
    config: Config, fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    wanted = config.model_copy(update={"train": config.train.model_copy(update={"device": "cuda"})})
    with fails_with(ConfigError, "train.device=cuda"):
        GRPOTrainer(wanted).__enter__()


def test_data_that_nothing_can_run_on(config: Config) -> None:
    """It is told before the service is started."""
    with fails_with(ConfigError, "train_dataset"):
        GRPOTrainer(config, train_dataset=[])
    with fails_with(ConfigError, "train_dataset[1]", "str"):
        GRPOTrainer(config, train_dataset=[{"n": 1}, "text"])
    with fails_with(ConfigError, "valid_dataset[0]", "tuple"):
        GRPOTrainer(config, train_dataset=[{"n": 1}], valid_dataset=((1, 2),))


def test_an_evaluation_without_data(config: Config, fakes: None) -> None:
    wanted = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 5})})
    with (
        fails_with(ConfigError, "valid_dataset"),
        GRPOTrainer(wanted, train_dataset=[{"n": 1}]) as trainer,
    ):
        trainer.train(workflow=Nothing)
    assert service_of(trainer).calls == ["stop"]


@pytest.mark.parametrize(
    ("number", "code", "end"), [(signal.SIGINT, 130, "stop"), (signal.SIGTERM, 143, "drain")]
)
def test_told_to_stop(config: Config, fakes: None, number: int, code: int, end: str) -> None:
    FakeLoop.then = lambda: signal.raise_signal(number)
    said: list[str] = []
    trainer = GRPOTrainer(config, train_dataset=[{"n": 1}], say=said.append)
    with fails_with(StopRequested, code=code), trainer:
        trainer.train(workflow=Nothing)
    assert service_of(trainer).calls == ["start", end]
    listening, _, told, over = said
    assert "any-agent server listening at" in listening and told.startswith("trainer ")
    # The command that was typed.
    assert "no checkpoint" in over and over.endswith(shlex.join(sys.orig_argv))


def test_told_to_stop_it_names_the_checkpoint(
    config: Config, fakes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = SavedWeights(Path("/runs/step-00000007"), 7, 7)
    monkeypatch.setattr(grpo_trainer, "latest_weights", lambda _: saved)
    FakeLoop.then = lambda: signal.raise_signal(signal.SIGINT)
    said: list[str] = []
    trainer = GRPOTrainer(config, train_dataset=[{"n": 1}], say=said.append)
    with pytest.raises(StopRequested), trainer:
        trainer.train(workflow=Nothing)
    assert "step 7" in said[-1] and "/runs/step-00000007" in said[-1]


def test_a_service_that_is_gone_ends_training_whatever_it_is_at(
    config: Config, fakes: None
) -> None:
    trainer = GRPOTrainer(config, train_dataset=[{"n": 1}])
    FakeLoop.then = lambda: service_of(trainer).fail(StartupError("engine 0 ended 6 times"))
    with fails_with(StartupError, "engine 0"), trainer:
        trainer.train(workflow=Nothing)
    assert service_of(trainer).calls == ["start", "stop"]


def test_another_model_is_not_trained_under_the_same_name(
    config: Config, fakes: None, tmp_path: Path
) -> None:
    folder = GRPOTrainer(config).dir.path
    (folder / "format").write_text("2\n")
    (folder / "config.yaml").write_text(f"root: {tmp_path}\nmodel:\n  path: /another\n")
    with (
        fails_with(ConfigError, "/another"),
        GRPOTrainer(config) as trainer,
    ):
        trainer.train()


class Numbered(Nothing):
    def __init__(self, x: int = 0) -> None:
        self.x = x


@pytest.mark.parametrize(
    ("kwargs", "evaluated", "eval_kwargs", "x", "same"),
    [
        ({"x": 1}, None, None, 1, True),
        ({"x": 1}, None, {"x": 2}, 2, False),
        ({"x": 1}, Numbered, None, 0, False),
        (None, Numbered, None, 0, True),
        (None, Numbered, {"x": 3}, 3, False),
    ],
)
def test_which_workflow_is_evaluated(
    config: Config, fakes: None, kwargs: Any, evaluated: Any, eval_kwargs: Any, x: int, same: bool
) -> None:
    with GRPOTrainer(config) as trainer:
        runs, eval_runs = trainer._resolve(
            grpo_trainer._Workflows(Numbered, kwargs, evaluated, eval_kwargs)
        )
    assert isinstance(eval_runs, Numbered) and eval_runs.x == x
    assert (runs is eval_runs) == same


def named(config: Config, **settings: str) -> GRPOConfig:
    return GRPOConfig.model_validate({**dict(config), **settings})


def test_what_is_trained_may_be_named_by_the_settings(config: Config, fakes: None) -> None:
    name = f"{__name__}.Nothing"
    runs: list[Any] = []

    class Noting(GRPOTrainer):
        def _make_loop(self, given: Any, accept: Any) -> Any:
            runs.append((given.train, given.eval))
            self._signals.received = None
            return SimpleNamespace(heartbeat=nullcontext, train=lambda: True)

    with Noting(named(config, workflow=name, eval_workflow="x.y"), train_dataset=[{}]) as trainer:
        with fails_with(ConfigError, "'x'"):
            trainer.train()
        assert runs == []
    with Noting(named(config, workflow=name), train_dataset=[{}]) as trainer:
        assert trainer.train()
        assert trainer.train(workflow=name)
        assert trainer.train(workflow=Nothing)
        assert runs == [(name, None), (name, None), (Nothing, None)]
        with fails_with(ConfigError, "workflow=other.Agent"):
            trainer.train(workflow="other.Agent")


def test_a_workflow_in_the_settings_needs_a_dataset(config: Config, fakes: None) -> None:
    trainer = GRPOTrainer(named(config, workflow=f"{__name__}.Nothing"))
    with trainer, fails_with(ConfigError, "train_dataset"):
        trainer.train()
