"""What is seen of a demo while its service comes up, and what is told when it fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from any_agent.demo import demo as module
from any_agent.errors import AnyAgentError
from any_agent.launcher import Node


def test_what_went_wrong_first_is_told() -> None:
    first = AnyAgentError("first")
    group = ExceptionGroup("", [ExceptionGroup("", [first, AnyAgentError("second")])])
    assert module.first_error(group) is first


def test_a_trainer_that_does_not_end_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    looks = iter([False, False, True])
    node = SimpleNamespace(check=lambda: next(looks), options=SimpleNamespace(say=said.append))
    module.await_trainer(cast(Node, node))
    assert said == []
    node.check = lambda: False
    monkeypatch.setattr(module, "FINISH_TIMEOUT", 0.1)
    module.await_trainer(cast(Node, node))
    assert said == ["trainer   has not ended 0.1 s after its last step"]
