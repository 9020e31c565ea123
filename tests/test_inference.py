"""Finding a trial's checkpoint; `tests/e2e/test_demo.py` loads one and asks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from any_agent import inference, load_engine
from any_agent.errors import ConfigError, NotFound
from any_agent.rundir import RunDir

NAMES: dict[str, Any] = {"experiment": "exp", "trial": "one", "user": "me"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A trial with a checkpoint, which had served other machines."""
    run = RunDir.of(tmp_path, "me", "exp", "one")
    run.create()
    (run.path / "config.yaml").write_text("server: {host: 0.0.0.0}\nmodel: {renderer: qwen3}\n")
    (run.checkpoints / "latest").write_text("step-00000020\n")
    return run


def test_a_trial_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"exp/one has no checkpoint in .*is `root` the folder"):
        load_engine(**NAMES, root=tmp_path)


def test_its_own_settings_are_used(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(inference, "load_chat_format", lambda path, **kw: seen.update(kw, at=path))
    monkeypatch.setattr(inference, "LocalModel", lambda path, chat, **kw: (path, kw))
    monkeypatch.setenv("ANY_AGENT_MODEL__RENDERER", "of-another-run")
    loaded: Any = load_engine(**NAMES, root=tmp_path, device="cuda")
    assert loaded == (run.checkpoints / "step-00000020", {"device": "cuda"})
    assert (seen["renderer"], seen["at"]) == ("qwen3", str(loaded[0]))


def test_a_folder_of_an_older_layout_is_refused_by_name(run: RunDir, tmp_path: Path) -> None:
    (run.path / "format").unlink()
    (run.path / "config.yaml").write_text("engine: {url: http://old}\n")
    with pytest.raises(ConfigError, match="is of format '1'"):
        load_engine(**NAMES, root=tmp_path)
