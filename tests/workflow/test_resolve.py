from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from any_agent.client.environment import PLACEHOLDER_KEY
from any_agent.errors import ConfigError
from any_agent.workflow import GroupedRolloutWorkflow, RolloutWorkflow, resolve_workflow
from any_agent.workflow.openai_proxy import AgentService, OpenAIProxyWorkflow
from tests.support.errors import fails_with

SERVICE = AgentService("http://127.0.0.1:1", "admin")

MODULE = """
from any_agent import RolloutWorkflow

class Mine(RolloutWorkflow):
    def __init__(self, turns, word="x"):
        self.turns, self.word = turns, word
    async def arun_episode(self, engine, data):
        return None

class Agent:
    def __init__(self, turns=1):
        self.turns = turns
    async def run(self, data, **extra_kwargs):
        return 1.0

class NoRun:
    pass

class Unfinished(RolloutWorkflow):
    pass

class Plain(RolloutWorkflow):
    def arun_episode(self, engine, data):
        return None

ready = Mine(5)
ready_agent = Agent(6)
number = 3
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module `made_workflows` beside the script that runs."""
    (tmp_path / "made_workflows.py").write_text(MODULE)
    (tmp_path / "made_broken.py").write_text("raise RuntimeError('at import')")
    (tmp_path / "made_needy.py").write_text("import made_missing_library")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("made_workflows")
    for name in ("made_workflows", "made_broken", "made_needy"):
        sys.modules.pop(name, None)


def test_a_workflow_is_found_by_name_class_or_instance(script: Any) -> None:
    for given in ("made_workflows.Mine", script.Mine):
        made: Any = resolve_workflow(given, {"turns": 2})
        assert isinstance(made, script.Mine)
        assert (made.turns, made.word) == (2, "x")
    assert resolve_workflow(script.ready) is script.ready
    assert resolve_workflow("made_workflows.ready") is script.ready


def test_an_agent_by_name_class_or_instance_becomes_a_workflow(script: Any) -> None:
    for given, kwargs, turns in (
        ("made_workflows.Agent", {"turns": 4}, 4),
        (script.Agent, None, 1),
        (script.ready_agent, {}, 6),
        ("made_workflows.ready_agent", None, 6),
    ):
        made = resolve_workflow(given, kwargs, agents=SERVICE)
        assert isinstance(made, OpenAIProxyWorkflow)
        assert made.agent.turns == turns
        assert made.service.admin_key == "admin"


@pytest.mark.parametrize(
    ("variables", "key"),
    [
        ({}, None),
        ({"OPENAI_API_KEY": "sk-mine"}, "sk-mine"),
        ({"OPENAI_API_KEY": PLACEHOLDER_KEY}, None),
        ({"OPENAI_API_KEY": "sk-mine", "ANY_AGENT_SERVER__ADMIN_KEY": "admin"}, "admin"),
    ],
)
def test_a_url_is_enough_of_a_service(
    script: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], key: str | None
) -> None:
    for name in ("OPENAI_API_KEY", "ANY_AGENT_SERVER__ADMIN_KEY"):
        monkeypatch.setenv(name, variables.get(name, ""))
    made = resolve_workflow(script.Agent, {"turns": 2}, 3, "http://127.0.0.1:1/v1")
    assert isinstance(made, GroupedRolloutWorkflow)
    agent: Any = made.workflow
    assert (made.group_size, agent.agent.turns) == (3, 2)
    assert (agent.service.url, agent.service.admin_key) == ("http://127.0.0.1:1", key)


REFUSED: list[tuple[str, dict[str, Any] | None, str]] = [
    ("Mine", None, "module.Class"),
    (".Mine", None, "'.Mine'"),
    ("made_nothing.Mine", None, "PYTHONPATH"),
    ("made_nothing.deep.Mine", None, "'made_nothing'"),
    ("made_workflows", None, "made_workflows.ClassName"),
    ("xml.sax", None, "xml.sax.ClassName"),
    ("made_workflows:Agent", None, "made_workflows.Agent"),
    ("made_workflows.Agnet", None, "made_workflows.Agent? Its classes are Mine, A"),
    ("made_workflows.Other", None, "Mine, Agent, NoRun, U"),
    ("made_broken.Mine", None, "RuntimeError: at import"),
    ("made_needy.Mine", None, "'made_missing_library'"),
    ("made_workflows.Mine", None, "'turns'"),
    ("made_workflows.Mine", {"turns": 1, "wrd": 2}, "'wrd'"),
    ("made_workflows.ready", {"turns": 1}, "workflow_kwargs (turns)"),
    ("made_workflows.NoRun", None, "async def run"),
    ("made_workflows.number", None, "run"),
    ("made_workflows.Unfinished", None, "arun_episode"),
    ("made_workflows.Plain", None, "arun_episode"),
]


@pytest.mark.parametrize(("name", "kwargs", "says"), REFUSED)
def test_a_workflow_that_cannot_be_resolved_is_an_error_with_its_remedy(
    script: Any, name: str, kwargs: dict[str, Any] | None, says: str
) -> None:
    with fails_with(ConfigError, says):
        resolve_workflow(name, kwargs, agents=SERVICE)


def test_without_a_workflow_or_an_agents_service_nothing_is_resolved(script: Any) -> None:
    with fails_with(ConfigError, "no workflow"):
        resolve_workflow(None)
    with fails_with(ConfigError, "Agent", "service"):
        resolve_workflow(script.Agent)


def test_a_workflow_whose_init_fails_fails_as_it_does() -> None:
    class Failing(RolloutWorkflow):
        def __init__(self) -> None:
            raise FileNotFoundError("rules.txt")

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> None:
            return None

    with fails_with(FileNotFoundError, "rules.txt"):
        resolve_workflow(Failing)
