"""The runner of the rings tells a fault from a flake, ends what hangs, and goes on where it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.script_module import load_script

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest
from pathlib import Path
from contract import Contract

def test_right():
    pass

def test_wrong():
    assert 1 == 2

def test_right_at_the_second_try():
    tried = Path("tried")
    if not tried.exists():
        tried.touch()
        raise RuntimeError("the first try")

class TestInherited(Contract):
    number = 2
"""
CONTRACT = """
import pytest

class Contract:
    @pytest.mark.parametrize("what", ["a.b::c/d"])
    def test_of_another_file(self, what):
        assert self.number == 1
"""
INHERITED = "tests/test_one.py::TestInherited::test_of_another_file[a.b::c/d]"
RIGHT = TESTS.replace("1 == 2", "True").replace("number = 2", "number = 1")


@pytest.fixture
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner in a project of its own, which is the working directory."""
    monkeypatch.delenv("FLAKY_LOG", raising=False)
    monkeypatch.chdir(tmp_path)
    # Plugins take most of a second to load.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "contract.py").write_text(CONTRACT)
    copy = tmp_path / "tools" / "rings.py"
    copy.write_bytes((ROOT / "tools" / "rings.py").read_bytes())
    return load_script(str(copy), "rings_copy")


def table(rings: ModuleType, ring: str, *stages: Any) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the stages; return the exit status and what was kept of each."""
    code = rings.run(ring, stages, again=False, more=())
    kept = {path.stem: json.loads(path.read_text()) for path in (rings.BUILD / ring).glob("*.json")}
    return code, kept


def suite(rings: ModuleType, name: str, **more: Any) -> Any:
    given = {"limit": 60, "paths": (f"tests/test_{name}.py",), "options": ("-q",)}
    return rings.Stage(name, **(given | more))


def test_a_test_that_passes_alone_is_flaky_and_one_that_fails_again_is_red(
    rings: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests" / "test_one.py").write_text(TESTS)
    code, kept = table(rings, "verify", suite(rings, "one"))
    flaky = "tests/test_one.py::test_right_at_the_second_try"
    assert (code, kept["one"]["passed"], kept["one"]["flaky"]) == (1, 2, [flaky])
    assert kept["one"]["failed"] == ["tests/test_one.py::test_wrong", INHERITED]
    (line,) = (tmp_path / "tests" / "flaky.jsonl").read_text().splitlines()
    assert json.loads(line)["first_line"] == "RuntimeError: the first try"
    assert capfd.readouterr().out.splitlines()[-1] == "2 passed, 2 failed, 0 skipped"


SKIPPED = "import pytest\n\ndef test_right():\n    pytest.skip('there is no server')\n"


def test_what_has_no_second_chance_is_red_at_once(rings: ModuleType, tmp_path: Path) -> None:
    """More failures than second chances, a test that was flaky twice, a suite that is skipped."""
    test = "tests/test_one.py::test_right_at_the_second_try"
    log = tmp_path / "tests" / "flaky.jsonl"
    cases = ((TESTS, 1, 3), (RIGHT, 10, 1), (SKIPPED, 10, 0), ("import nothing_so_named\n", 10, 1))
    for text, chances, failed in cases:
        (tmp_path / "tried").unlink(missing_ok=True)
        (tmp_path / "tests" / "test_one.py").write_text(text)
        log.write_text(f"{json.dumps({'test': test})}\n" * 2)
        code, kept = table(rings, "verify", suite(rings, "one", second_chances=chances))
        one = kept["one"]
        assert (code, one["ok"], one["flaky"]) == (1, False, [])
        assert len(one["failed"]) == failed, (text, one)
    # A second try that is skipped is no pass either.
    log.unlink()
    skips = "if tried.exists(): pytest.skip('no')\n    else:"
    text = RIGHT.replace("if not tried.exists():", skips)
    (tmp_path / "tried").unlink(missing_ok=True)
    (tmp_path / "tests" / "test_one.py").write_text(text)
    code, kept = table(rings, "verify", suite(rings, "one"))
    assert (code, len(kept["one"]["failed"])) == (1, 1)


def test_a_stage_past_its_limit_fails_by_name_and_verify_goes_on(
    rings: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests" / "test_good.py").write_text("def test_right(): pass\n")
    slow = rings.Stage("slow", 0.5, command=("sleep", "60"))
    code, kept = table(rings, "verify", slow, suite(rings, "good"))
    assert code == 1
    assert (kept["slow"]["ok"], kept["good"]["ok"]) == (False, True)
    assert "slow took more than 0 s and is ended" in capfd.readouterr().out
    code, kept = table(rings, "ci", slow, suite(rings, "good"))
    assert (code, kept.keys()) == (1, {"slow"}), "continuous integration ends at a red stage"


@pytest.mark.service
def test_a_suite_that_was_green_at_this_commit_is_not_run_again(
    rings: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "tests" / "test_one.py").write_text("def test_right(): open('ran', 'a').write('x')")
    (tmp_path / ".gitignore").write_text("build/\n.venv\nran\n__pycache__/\n.pytest_cache/\n")
    git = ["git", "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    ran, one = tmp_path / "ran", suite(rings, "one")
    # What options chose is no suite, and is not kept.
    assert rings.run("verify", [one], again=False, more=("-k", "test_right")) == 0
    assert not list((rings.BUILD / "verify").glob("*.json"))
    for _ in range(2):
        assert table(rings, "verify", one)[0] == 0
        assert ran.read_text() == "xx"
    subprocess.run([*git, "commit", "-qm", "two", "--allow-empty"], cwd=tmp_path, check=True)
    assert table(rings, "verify", one)[0] == 0
    assert ran.read_text() == "xxx"


def test_every_test_file_is_in_a_ring(rings: ModuleType) -> None:
    """A test that no suite's name matches is run by none of them."""
    live = set((ROOT / "tests").rglob("*_live.py"))
    named = {path for stage in rings.SUITES for name in stage.paths for path in ROOT.glob(name)}
    assert live <= named
    folders = {f"tests/{name}" for name in ("e2e", "chaos", "laws", "benchmarks")}
    assert folders <= {name for stage in rings.SUITES for name in stage.paths}
