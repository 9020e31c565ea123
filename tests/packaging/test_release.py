"""The checklist of a release notices what is missing."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.script_module import load_script

ROOT = Path(__file__).resolve().parents[2]
PROJECT = '[project]\nname = "any-agent-rl"\nversion = "1.2.3"\n'
PACKAGE = '__version__ = "1.2.3"\n'
NOTES = "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-11-27\n\n### Added\n\n- a\n"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load_script("tools/release.py")


def test_a_version_that_is_not_everywhere_is_named(release: ModuleType) -> None:
    assert release.version_problem(PROJECT, PACKAGE, NOTES) == ""
    no_entry = "CHANGELOG.md has no '## [1.2.3]"
    cases = (
        ('__version__ = "1.2.2"\n', NOTES, "pyproject.toml has 1.2.3, any_agent 1.2.2"),
        (PACKAGE, NOTES.replace("1.2.3", "1.2.2"), no_entry),
        (PACKAGE, NOTES.replace(" - 2026-11-27", ""), no_entry),
        (PACKAGE, NOTES.replace("d]\n\n", "d]\n\n- a note\n\n", 1), "notes under "),
    )
    for package, notes, said in cases:
        assert said in release.version_problem(PROJECT, package, notes)
    ours = [
        (ROOT / name).read_text("utf-8") for name in ("pyproject.toml", "any_agent/__init__.py")
    ]
    assert "pyproject.toml has" not in release.version_problem(*ours, "")


def test_checksums_are_of_all_files_of_a_release(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "DIST", tmp_path)
    monkeypatch.setattr(release, "SUMS", tmp_path / "SHA256SUMS")
    for name in ("a-1.whl", "a-1.tar.gz"):
        (tmp_path / name).write_bytes(name.encode())
    assert "make dist" in release.checksums()
    (tmp_path / "a-1.cdx.json").write_bytes(b"{}")
    assert release.checksums() == ""
    lines = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert f"{hashlib.sha256(b'a-1.whl').hexdigest()}  a-1.whl" in lines
    assert len(lines) == 3


def test_a_failed_step_fails_the_list(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"one": lambda: "do this", "two": lambda: ""}
    monkeypatch.setattr(release, "STEPS", steps)
    monkeypatch.setattr(sys, "argv", ["release.py"])
    assert release.main() == 1
    out = capsys.readouterr().out
    assert "failed    do this" in out and out.endswith("1 of 2 failed: one\n")
    monkeypatch.setattr(sys, "argv", ["release.py", "--only", "two"])
    assert release.main() == 0
