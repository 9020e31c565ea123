from __future__ import annotations

import hmac
import secrets
from unittest.mock import Mock

import pytest

from any_agent import keys
from any_agent.keys import (
    KEPT_SCOPES,
    KEY_PREFIXES,
    KeySigner,
    Lane,
    SecretHash,
    key_id,
    new_key,
    rank_of_session,
    session_prefix,
)

SECRET = bytes(range(32))


def test_a_key_names_its_lane() -> None:
    signer = KeySigner(SECRET)
    lane, key = signer.mint(12)
    assert key.startswith("sk-v1.12.")
    assert signer.verify(key) == lane == Lane(12, lane.id)
    assert signer.key_of(lane) == key
    assert KeySigner(SECRET).verify(key) == lane, "a restart makes no key void"
    assert signer.mint(12)[1] != key


def test_a_key_that_was_changed_or_forged_is_refused() -> None:
    signer = KeySigner(SECRET)
    _, key = signer.mint(1)
    version, rank, lane, mac = key.split(".")
    other = KeySigner(bytes(32))
    flipped = mac[:-1] + ("0" if mac[-1] != "0" else "1")
    for forged in (
        "",
        "sk-v1.",
        key[:-1],
        key + "0",
        key + "\n",
        " " + key,
        key.upper(),
        f"{version}.{rank}.{lane}.{flipped}",
        f"{version}.2.{lane}.{mac}",
        f"{version}.01.{lane}.{mac}",
        f"{version}.١.{lane}.{mac}",
        f"{version}.{rank}.{lane[::-1]}.{mac}",
        f"sk-v2.{rank}.{lane}.{mac}",
        other.key_of(Lane(1, lane)),
    ):
        assert signer.verify(forged) is None, forged


@pytest.mark.parametrize("candidate", ["", "operator-secre", "operator-secret ", "\ud800"])
def test_secrets_are_compared_by_hash(candidate: str) -> None:
    hashed = SecretHash("operator-secret")
    assert hashed.matches("operator-secret")
    assert not hashed.matches(candidate)
    assert "operator" not in repr(vars(hashed))


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("/sk-v1.0.a.b/v1/x", "sk-v1.0.a.b"),
        ("/ses-0-a/", "ses-0-a"),
        ("/sk-v1./v1", "sk-v1."),
        ("/task-0-0/v1/chat/completions", "task-0-0"),
        ("/a.b_c-1-12-345/rl/set_reward", "a.b_c-1-12-345"),
        ("/task-0-0", None),
        ("/task-00-0/v1", None),
        ("/task-0-\u0660/v1", None),
        ("/-0-0/v1", None),
        (f"/{'t' * 48}-9999-0/v1", f"{'t' * 48}-9999-0"),
        (f"/{'t' * 49}-0-0/v1", None),
        ("/v1/task-0-0/x", None),
        ("/sk-v1.0.a.b", None),
        ("/v1/ses-0-a/x", None),
        ("/sk-v2.0.a.b/v1", None),
        ("ses-0-a/v1", None),
        ("/", None),
        ("", None),
    ],
)
def test_the_session_in_front_of_a_path_is_found(path: str, prefix: str | None) -> None:
    assert session_prefix(path) == prefix


@pytest.mark.parametrize(
    ("session_id", "rank"),
    [
        ("ses-3-0123456789abcdef", 3),
        ("task-0-0", 0),
        ("a-7-3-12", 3),
        ("task-3", None),
        ("task-3-x", None),
        ("task-12345-0", None),
        ("ta/sk-0-0", None),
        ("", None),
    ],
)
def test_an_id_names_its_rank(session_id: str, rank: int | None) -> None:
    assert rank_of_session(session_id) == rank


def test_of_several_secrets_the_first_signs_and_all_verify() -> None:
    secrets = [b"n" * 32, SECRET]
    signer = KeySigner(lambda _: secrets)
    old = KeySigner(SECRET)
    lane, key = old.mint(3)
    assert signer.verify(key) == lane
    assert signer.key_of(lane) == KeySigner(b"n" * 32).key_of(lane) != key
    assert list(signer.keys_of(lane)) == [signer.key_of(lane), key]
    assert signer.is_run_key(old.run_key) and signer.is_run_key(signer.run_key)
    assert signer.run_key != old.run_key
    assert not old.is_run_key(signer.run_key)


def test_a_key_of_a_newer_secret_is_looked_up_before_it_is_refused() -> None:
    looks: list[float | None] = []

    def secrets(within: float | None) -> list[bytes]:
        looks.append(within)
        return [SECRET] if within is None else [b"n" * 32, SECRET]

    signer, newer = KeySigner(secrets), KeySigner(b"n" * 32)
    lane, key = newer.mint(0)
    assert signer.verify(key) == lane and signer.is_run_key(newer.run_key)
    assert signer.verify(KeySigner(b"x" * 32).mint(0)[1]) is None
    # A genuine key costs no look but the usual ones.
    looks.clear()
    assert signer.verify(KeySigner(SECRET).mint(0)[1]) is not None and looks == [None]


@pytest.mark.parametrize("scope", KEPT_SCOPES)
def test_new_keys_have_their_form_and_other_texts_have_no_id(scope: str) -> None:
    text, id = new_key(scope)
    assert text.startswith(f"sk-{scope}.{id}.") and text.startswith(KEY_PREFIXES)
    assert len(text.rpartition(".")[2]) * 4 >= 128, "bits"
    assert key_id(text) == id != key_id(new_key(scope)[0])
    for other in (text[:-1], text + "0", text.upper(), f" {text}", f"{text}\n", "sk-v1.0.a.b", ""):
        assert key_id(other) is None


def test_a_genuine_key_is_computed_once_and_a_forged_one_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forged ones would fill the memory. For each, the secrets are read anew and tried again."""
    signer = KeySigner(secrets.token_bytes(32))
    lane, key = signer.mint(1)
    forged = f"{key[:-1]}{'0' if key[-1] != '0' else '1'}"
    for text, found, computed in ((key, lane, 1), (forged, None, 4)):
        digest = Mock(wraps=hmac.digest)
        with monkeypatch.context() as patch:
            patch.setattr(hmac, "digest", digest)
            assert [signer.verify(text) for _ in range(2)] == [found] * 2
        assert digest.call_count == computed


def test_a_key_ends_with_its_secret() -> None:
    old, new = secrets.token_bytes(32), secrets.token_bytes(32)
    known = [old]
    signer = KeySigner(lambda _: known)
    lane, key = signer.mint(0)
    assert signer.verify(key) == lane
    known[:] = [new, old]
    assert signer.verify(key) == lane
    known[:] = [new]
    assert signer.verify(key) is None


def test_every_command_finds_an_operators_key_before_that_of_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in keys.OPERATOR_KEYS:
        monkeypatch.delenv(name, raising=False)
    assert keys.operator_key(None) == (None, "")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-proj-of-another-provider")
    assert keys.operator_key(None) == (None, "")
    monkeypatch.setenv("ANY_AGENT_API_KEY", "a tenant's")
    assert keys.operator_key(None) == ("a tenant's", "ANY_AGENT_API_KEY")
    monkeypatch.setenv("ANY_AGENT_KEY", "an operator's")
    assert keys.operator_key(None) == ("an operator's", "ANY_AGENT_KEY")
    assert keys.operator_key("given") == ("given", "--key")
