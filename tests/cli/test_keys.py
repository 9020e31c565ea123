"""``any-agent keys``, as people call it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from any_agent.auth.key_store import read_keys
from any_agent.cli.main import main
from any_agent.keys import key_id
from any_agent.rundir.layout import RunDir

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trial(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "u" / "e" / "t")


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        where = [f"root={tmp_path}", "user=u", "experiment=e", "trial=t"]
        new = ["--new-trial"] if "create" in arguments else []
        try:
            code = main(["keys", *arguments, *new, *where])
        except SystemExit as error:
            code = int(error.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_a_key_is_shown_once(run: Run, trial: RunDir) -> None:
    """Before the trial's first start, too; the key alone on standard output."""
    code, out, err = run("create", "--scope", "tenant", "--tenant", "alice")
    assert code == 0
    key = out.strip()
    found = read_keys(trial.keys).find(key)
    assert found is not None and found.tenant == "alice"
    assert found.id in err and key not in err
    for path in trial.path.rglob("*"):
        assert path.is_dir() or key.rpartition(".")[2] not in path.read_text()
    _, out, err = run("list")
    assert found.id in out and "alice" in out and "live" in out
    assert key not in out + err and found.hash not in out + err
    assert (trial.path / "audit").stat().st_mode & 0o777 == 0o700


def test_keys_are_made_listed_and_revoked_as_json(run: Run, trial: RunDir) -> None:
    limits = ["--open-sessions", "4", "--requests-per-second", "2.5"]
    code, out, _ = run(
        "create", "--scope", "tenant", "--tenant", "a", *limits, "--expires-in", "2h", "--json"
    )
    made = json.loads(out)
    assert code == 0 and key_id(made["key"]) == made["id"]
    assert made["limits"] == {"open_sessions": 4, "requests_per_second": 2.5}
    assert 7190 < made["expires_at"] - made["created_at"] < 7210
    code, out, _ = run("list", "--json")
    assert json.loads(out) == [{k: v for k, v in made.items() if k != "key"}]
    code, out, _ = run("revoke", "--json", made["id"])
    assert json.loads(out)["state"] == "revoked"
    assert read_keys(trial.keys).find(made["key"]) is None


def test_a_key_is_revoked_once_and_the_last_admin_key_with_a_warning(run: Run) -> None:
    _, key, _ = run("create", "--scope", "admin")
    id = key_id(key.strip())
    assert id is not None
    code, out, err = run("revoke", id)
    assert code == 0 and "is revoked" in out
    assert "holds no admin key any more" in err
    assert run("revoke", id)[1].endswith("was revoked already\n")
    code, _, err = run("revoke", "0badcafe")
    assert code == 1 and "0badcafe" in err and "any-agent keys list" in err


def test_a_key_that_is_given_for_its_id_is_not_repeated(run: Run) -> None:
    _, out, _ = run("create", "--scope", "trainer")
    key = out.strip()
    secret = key.rpartition(".")[2]
    for wrong in (f"{key}x", secret):
        code, out, err = run("revoke", wrong)
        assert code == 1 and secret[:9] not in out + err
    code, out, err = run("revoke", key)
    assert code == 0 and "is revoked" in out and secret not in out + err


def test_a_mistyped_trial_gets_no_key(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error has the trial that was meant, and the word for a new one."""
    run("create", "--scope", "admin")
    where = [f"root={tmp_path}", "user=u", "experiment=e", "trial=tt"]
    assert main(["keys", "create", "--scope", "admin", *where]) == 1
    err = capsys.readouterr().err
    assert "e/t (user u)" in err and "--new-trial" in err
    assert not (tmp_path / "u" / "e" / "tt").exists()


def test_a_trial_that_is_not_there_is_refused_and_not_made(run: Run, trial: RunDir) -> None:
    for command in (("list",), ("revoke", "00000000"), ("rotate",)):
        code, _, err = run(*command)
        assert code == 1 and f"there is no trial e/t in {trial.path}" in err
        assert not trial.path.exists()


WRONG = {
    "": "COMMAND",
    "create": "--scope",
    "create --scope session": "there is no 'session'",
    "create --scope tenant": "--tenant",
    "create --scope tenant --tenant ../up": "--tenant",
    "create --scope admin --tenant alice": "scope tenant",
    "create --scope trainer --open-sessions 3": "scope tenant",
    "create --scope tenant --open-sessions 0": "whole number",
    "create --scope tenant --tokens-per-second nan": "above 0",
    "create --scope tenant --tenant 'a b'": "--tenant 'a b' is no valid name",
    "create --scope admin --expires-in soon": "like 90s",
    "create --scope admin --expires-in 5": "like 90s",
    "create --scope admin server.prot=1": "server.port",
    "revoke --odd": "--odd",
}


def test_wrong_input_is_refused(run: Run, trial: RunDir) -> None:
    for words, says in WRONG.items():
        code, out, err = run(*shlex.split(words))
        assert (code, out) == (2, "") and says in err, words
    assert not trial.keys.exists()


def test_each_change_of_keys_is_audited_without_the_keys(run: Run, trial: RunDir) -> None:
    _, key, _ = run("create", "--scope", "tenant", "--tenant", "alice")
    id = key_id(key.strip())
    run("revoke", str(id))
    run("rotate", "--drop-old")
    text = (trial.audit / "keys.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["event"], line.get("id")) for line in lines] == [
        ("keys create", id),
        ("keys revoke", id),
        ("keys rotate", None),
    ]
    assert all(line["who"] and line["at"] for line in lines)
    assert lines[2]["dropped_old"] is True
    assert "sk-" not in text


def test_who_makes_a_key_is_told_what_it_changes(run: Run, trial: RunDir) -> None:
    err = run("create", "--scope", "admin")[2]
    assert f"has not been started yet: {trial.path};" in err and "--trial" in err
    assert "from now on" not in err
    trial.create()
    (trial.path / "config.yaml").write_text("{}")
    trial.keys.unlink()
    err = run("create", "--scope", "admin")[2]
    assert "started yet" not in err and "from now on" in err
    assert "everybody" not in run("create", "--scope", "admin")[2]
    trial.keys.unlink()
    assert "open to everybody" in run("create", "--scope", "trainer")[2]


def test_a_key_that_cannot_be_audited_is_not_made(run: Run, trial: RunDir) -> None:
    trial.path.mkdir(parents=True)
    (trial.path / "audit").write_text("in the way")
    code, out, err = run("create", "--scope", "admin")
    assert (code, out) == (1, "") and "cannot write" in err
    assert not trial.keys.exists()
