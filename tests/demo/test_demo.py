"""What is seen of a demo while its service comes up, and what is told when it fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from any_agent.demo import demo as module
from any_agent.demo.demo import Demo, part_names
from any_agent.demo.run import demo_config
from any_agent.demo.state import PartState
from any_agent.errors import AnyAgentError
from any_agent.launcher import Node


def test_parts_are_seen_before_they_are_started(tmp_path: Path) -> None:
    demo = Demo(demo_config(tmp_path, seed=0, steps=1, ranks=2), tmp_path)
    names = ["engine-0", "engine-1", "rank-0", "rank-1", "router", "trainer"]
    assert part_names(2) == names
    assert demo.state().parts == tuple(PartState(name) for name in names)
    known = {"engine-0": SimpleNamespace(state="ready", restarts=1)}
    demo._node = SimpleNamespace(parts=known)  # type: ignore[assignment]
    seen = demo.state().parts
    assert seen[:2] == (PartState("engine-0", "ready", 1), PartState("engine-1"))
    assert demo.state().elapsed > 0


def test_what_went_wrong_first_is_told() -> None:
    first = AnyAgentError("first")
    group = ExceptionGroup("", [ExceptionGroup("", [first, AnyAgentError("second")])])
    assert module._first(group) is first


def test_a_trainer_that_does_not_end_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    looks = iter([False, False, True])
    node = SimpleNamespace(check=lambda: next(looks), options=SimpleNamespace(say=said.append))
    module._finish(cast(Node, node))
    assert said == []
    node.check = lambda: False
    monkeypatch.setattr(module, "_FINISH_TIMEOUT", 0.1)
    module._finish(cast(Node, node))
    assert said == ["trainer   has not ended 0.1 s after its last step"]
