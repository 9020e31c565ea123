"""The environments of the clients' packages are made before tests, and never by them."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from tests.clients import environment as environments
from tests.clients.environment import (
    ENVIRONMENTS,
    Environment,
    make,
    make_all,
    node_with,
    python_with,
)
from tests.support.errors import fails_with


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all environments, empty."""
    made = tmp_path / "environments"
    monkeypatch.setattr(environments, "FOLDER", made)
    return made


def test_a_test_without_its_environment_says_what_makes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CI", "")
    for name in ("camel-rlvr", "math-agent", "example-camel"):
        suite = ENVIRONMENTS[name].suites[0]
        with pytest.raises(pytest.fail.Exception, match=f"-m tests.clients.environment {suite}$"):
            python_with(name)
    assert not folder.exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    with fails_with(pytest.skip.Exception, "npm"):
        node_with("openai-npm")
    npm = tmp_path / "npm"
    npm.write_text("")
    npm.chmod(stat.S_IRWXU)
    with pytest.raises(pytest.fail.Exception, match=r"-m tests.clients.environment clients$"):
        node_with("openai-npm")


def test_an_environment_is_made_once_for_its_pins_and_others_are_named(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without packages it is made without a download."""
    pins = tmp_path / "pins.txt"
    pins.write_text("")
    one = Environment("one", pins, ours=True)
    monkeypatch.setitem(ENVIRONMENTS, "one", one)
    assert make(one)
    assert not make(one)
    assert python_with("one") == one.python
    assert one.python.resolve() == Path(sys.executable).resolve()
    one.pins.write_text("# changed\n")
    with fails_with(pytest.fail.Exception, "pins"):
        python_with("one")
    assert make(one)
    gone = Environment("gone", tmp_path / "no-such-pins.txt")
    assert make_all([gone, one]) == 1
    told = capsys.readouterr()
    assert [line.split()[:2] for line in sorted(told.out.splitlines())] == [
        ["gone", "failed"],
        ["one", "there"],
    ]
    assert "no-such-pins.txt" in told.err
    assert told.err.splitlines()[-1] == "error: could not be made: gone"
