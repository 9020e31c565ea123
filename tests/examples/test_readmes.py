"""The examples' READMEs: what they tell to type is right, as far as that can be told unrun."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from any_agent import GRPOConfig, load_expr_config
from tests.support.examples import EXAMPLES, command_of, tiny_settings
from tests.support.script_module import load_script

SCRIPTS = sorted(path.parent.name for path in EXAMPLES.glob("*/train.py"))


@pytest.fixture(autouse=True)
def _excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts that read their settings change it."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def config_class(example: str) -> type[Any]:
    """The settings that its script takes."""
    name = f"example_{example}"
    module = load_script(f"examples/{example}/train.py", name)
    kinds = [k for k in vars(module).values() if isinstance(k, type) and issubclass(k, GRPOConfig)]
    own = [k for k in kinds if k.__module__ == name]
    return (own or kinds)[0]


@pytest.mark.parametrize("example", SCRIPTS)
def test_its_command_and_settings_are_taken(example: str) -> None:
    program, script, *options = command_of(example)
    given = ["--config", f"examples/{example}/config.yaml"]
    assert [program, script, *options] == ["python", f"examples/{example}/train.py", *given]
    given[1] = str(EXAMPLES / example / "config.yaml")
    kind = config_class(example)
    config, _ = load_expr_config(given, kind)
    assert config.rollout.batch_size % config.sessions.group_size == 0
    config, _ = load_expr_config([*given, *tiny_settings(example)], kind)
    assert (config.model.path, config.server.ranks) == ("/tmp/tiny", 1)
    requirements = EXAMPLES / example / "requirements.txt"
    text = (EXAMPLES / example / "README.md").read_text(encoding="utf-8")
    told = f"pip install -r examples/{example}/requirements.txt" in text
    assert told == requirements.exists()
