"""The types of the public names, as a user's strict type checker sees them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("public_api.py")

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(shutil.which("node") is None, reason="pyright needs node"),
]


def errors_of(program: Path) -> list[str]:
    """Return pyright's complaints about a program that is checked strictly."""
    settings = program.with_name("pyrightconfig.json")
    settings.write_text(
        json.dumps(
            {
                "include": [program.name],
                "extraPaths": [str(ROOT)],
                "pythonVersion": "3.11",
                "typeCheckingMode": "strict",
            }
        )
    )
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, "--project", str(settings)], capture_output=True, text=True, timeout=240
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [each["message"] for each in found if each["severity"] == "error"]


def test_a_strict_checker_knows_every_type(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.read_text(encoding="utf-8"), encoding="utf-8")
    assert errors_of(program) == []


def test_a_wrong_type_is_noticed(tmp_path: Path) -> None:
    text = PROGRAM.read_text(encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(text.replace("session.base_url, str)", "session.base_url, int)"))
    assert len(errors_of(program)) == 1


def test_each_package_says_that_it_is_typed() -> None:
    packages = [p.parent for p in ROOT.glob("*/__init__.py") if p.parent.name != "tests"]
    assert len(packages) == 4
    assert not [p.name for p in packages if not (p / "py.typed").exists()]
