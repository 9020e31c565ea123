"""The environments of the clients' packages: one table, made before tests and never by them."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from tests.clients import environment as environments
from tests.clients.connect.cases import PYTHON
from tests.clients.environment import (
    ENVIRONMENTS,
    ROOT,
    SUITES,
    Environment,
    NotMade,
    main,
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


@pytest.fixture
def one(folder: Path, tmp_path: Path) -> Environment:
    """An environment without packages: it is made without a download."""
    pins = tmp_path / "pins.txt"
    pins.write_text("")
    return Environment("one", pins, ours=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that were to be run, of which those of uv fail."""
    ran: list[str] = []

    def run(command: list[object]) -> None:
        ran.append(" ".join(map(str, command)))
        if " pip " in ran[-1]:
            raise NotMade("no such host")

    monkeypatch.setattr(environments, "_run", run)
    return ran


def test_the_table_has_all_pins() -> None:
    patterns = ("clients/*/*.txt", "clients/*/package.json", "examples/pins/*", "documents/*.txt")
    pins = {file for pattern in patterns for file in (ROOT / "tests").glob(pattern)}
    pins |= set((ROOT / "examples").glob("*/package.json"))
    assert {one.pins for one in ENVIRONMENTS.values()} == pins
    assert all(one.stamp and set(one.suites) <= set(SUITES) for one in ENVIRONMENTS.values())


def test_the_table_has_what_the_pages_of_connect_need() -> None:
    assert {name for names in PYTHON.values() for name in names} <= ENVIRONMENTS.keys()


@pytest.mark.parametrize("name", ["camel-rlvr", "math-agent", "example-camel"])
@pytest.mark.parametrize("ci", ["", "true"])
def test_a_test_without_its_environment_says_what_makes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, ci: str
) -> None:
    monkeypatch.setenv("CI", ci)
    suite = ENVIRONMENTS[name].suites[0]
    with pytest.raises(pytest.fail.Exception, match=f"-m tests.clients.environment {suite}$"):
        python_with(name)
    assert not folder.exists()


def test_npm_without_its_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CI", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with fails_with(pytest.skip.Exception, "npm"):
        node_with("openai-npm")
    npm = tmp_path / "npm"
    npm.write_text("")
    npm.chmod(stat.S_IRWXU)
    with pytest.raises(pytest.fail.Exception, match=r"-m tests.clients.environment clients$"):
        node_with("openai-npm")


def test_an_environment_is_made_once_for_its_pins(
    one: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENVIRONMENTS, "one", one)
    assert make(one)
    assert not make(one)
    assert python_with("one") == one.python
    assert one.python.resolve() == Path(sys.executable).resolve()
    one.pins.write_text("# changed\n")
    with fails_with(pytest.fail.Exception, "pins"):
        python_with("one")
    assert make(one)


def test_uv_is_tried_twice(one: Environment, calls: list[str]) -> None:
    with fails_with(NotMade, "no such host"):
        make(one)
    assert [" pip " in call for call in calls] == [False, True, True]
    assert not one.is_made


@pytest.mark.parametrize("programs", [(), ("agent", "other")])
def test_npm_runs_no_script_but_those_of_programs(
    folder: Path,
    calls: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    programs: tuple[str, ...],
) -> None:
    monkeypatch.setattr(environments.shutil, "which", lambda name: name)
    for name in ("package.json", "package-lock.json"):
        (tmp_path / name).write_text("{}")
    environments._make_of_npm(Environment("two", tmp_path / "package.json", programs=programs))
    install, *rebuilt = calls
    assert "--ignore-scripts" in install
    assert rebuilt == ([f"npm rebuild --prefix {folder / 'two'} agent other"] if programs else [])


def test_all_are_tried_and_those_that_fail_are_named(
    one: Environment, calls: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = Environment("there", one.pins)
    there.python.parent.mkdir(parents=True)
    there.python.touch()
    there.stamp.touch()
    gone = Environment("gone", tmp_path / "no-such-pins.txt")
    assert make_all([one, gone, there]) == 1
    told = capsys.readouterr()
    assert {tuple(line.split(maxsplit=1)) for line in told.out.splitlines()} == {
        ("one", "failed"),
        ("gone", "failed"),
        ("there", "there already"),
    }
    assert "no such host" in told.err and "no-such-pins.txt" in told.err
    assert told.err.splitlines()[-1] == "error: could not be made: one, gone"


def test_an_unknown_suite_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["example"])
    assert "no suite is named example" in capsys.readouterr().err
