"""The service in the trainer's process: it starts, is watched, and ends, all in one thread."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from any_agent.config import Config, load_config
from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.engines import SHARED_GPUS
from any_agent.launcher.shutdown import Terminated
from tests.support.errors import fails_with
from trainer import service as module
from trainer.service import LocalService

LIMIT = 60.0


class FakeNode:
    """Notes what is done to it, and in which thread; ``broken`` says what it raises when."""

    broken: dict[str, BaseException]

    def __init__(self, config: Config, options: Any, over: threading.Event) -> None:
        self.config = config
        self.options = options
        self.dir = SimpleNamespace(metrics=config.root / "metrics.jsonl")
        self.url = "http://here"
        self.gpus = SimpleNamespace(sharing="some")
        self.threads: set[str] = set()
        self.ended: list[Any] = []
        self.checked = threading.Event()

    def __enter__(self) -> FakeNode:
        self._note("enter")
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._note("exit")
        self.ended.append(kind)

    def check(self) -> bool:
        self._note("check")
        self.checked.set()
        return False

    def _note(self, what: str) -> None:
        self.threads.add(threading.current_thread().name)
        if what in self.broken:
            raise self.broken[what]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(None, [f"root={tmp_path}", f"model.path={tmp_path / 'none'}"], environ={})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeNode]:
    monkeypatch.setattr(module, "AbandonableNode", FakeNode)
    FakeNode.broken = {}
    # Set again at the test's end, whatever was there.
    monkeypatch.setenv(SHARED_GPUS, "none")
    return FakeNode


def node_of(service: LocalService) -> FakeNode:
    node = service.node
    assert isinstance(node, FakeNode)
    return node


@pytest.mark.parametrize(("drain", "how"), [(False, None), (True, Terminated)])
def test_a_local_service_shows_steps_until_it_stops(
    config: Config, fake: type[FakeNode], drain: bool, how: Any
) -> None:
    said: list[str] = []
    service = LocalService(config, say=said.append)
    service.start()
    assert service.node.url == "http://here"
    node = node_of(service)
    assert node.checked.wait(LIMIT)
    line = '{"step": 1, "reward": 1, "version": 1, "staleness_mean": 0, '
    node.dir.metrics.write_text(line + '"seconds": {"wait": 0}}\n')
    service.stop(drain=drain)
    # The last steps are shown, too, and what was entered in a thread was left in the same.
    assert [text.split()[0] for text in said] == ["step"]
    assert node.threads == {"service"}
    assert node.ended == [how]
    assert service.error is None


def test_an_error_that_ends_the_service_reaches_the_trainer_once(
    config: Config, fake: type[FakeNode]
) -> None:
    error = StartupError("engine 0 ended 6 times")
    FakeNode.broken = {"check": error}
    told: Queue[BaseException] = Queue()
    service = LocalService(config, say=print, failed=told.put)
    service.start()
    assert told.get(timeout=LIMIT) is error
    service.stop()
    assert told.empty() and service.error is error
    assert node_of(service).ended == [StartupError]


def test_a_start_that_fails_raises_its_error_and_can_be_stopped(config: Config) -> None:
    service = LocalService(config, say=print, failed=lambda error: pytest.fail(str(error)))
    service.stop()  # one that was never started
    with fails_with(ConfigError, "model folder"):
        service.start()
    service.stop()


def test_a_start_that_is_given_up_leaves_no_service_behind(
    config: Config, fake: type[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does while parts are starting."""
    service = LocalService(config, say=print)

    def interrupted() -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(service.ready, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        service.start()
    assert not any(one.name == "service" for one in threading.enumerate())
    assert node_of(service).ended == [None]
