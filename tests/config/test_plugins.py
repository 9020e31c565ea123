"""Modules of a user, which each process of a run imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from any_agent.config import load_config, load_resolved
from any_agent.errors import ConfigError
from tests.support.errors import fails_with


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def resolved(folder: Path, *plugins: str) -> Path:
    """Write the settings of a run as its processes get them."""
    config = load_config(None, [f"plugins={','.join(plugins)}"], {})
    assert config.plugins == plugins
    file = folder / "resolved.yaml"
    file.write_text(yaml.safe_dump(config.dump()))
    return file


def test_each_process_imports_them_once_and_in_order(folder: Path) -> None:
    for name in ("first_plugin", "second_plugin"):
        (folder / f"{name}.py").write_text("import os; os.environ['PLUGINS'] += __name__ + ' '")
    file = resolved(folder, "first_plugin", "second_plugin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLUGINS", "")
        assert load_resolved(file, {}) == load_resolved(file, {})
        assert os.environ["PLUGINS"] == "first_plugin second_plugin "
    for name in ("first_plugin", "second_plugin"):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (None, "plugins=bad_plugin"),
        ("import no_such_package", "'no_such_package'"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_one_that_cannot_be_imported_is_named(folder: Path, code: str | None, problem: str) -> None:
    if code is not None:
        (folder / "bad_plugin.py").write_text(code)
    with fails_with(ConfigError, problem):
        load_resolved(resolved(folder, "bad_plugin"), {})
