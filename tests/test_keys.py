from __future__ import annotations

import pytest

from any_agent.keys import KeySigner, Lane, SecretHash, session_prefix

SECRET = bytes(range(32))


def test_a_key_names_its_lane() -> None:
    signer = KeySigner(SECRET)
    lane, key = signer.mint(12)
    assert key.startswith("sk-v1.12.")
    assert signer.verify(key) == lane == Lane(12, lane.id)
    assert signer.key_of(lane) == key
    assert KeySigner(SECRET).verify(key) == lane, "a restart makes no key void"
    assert signer.mint(12)[1] != key


def test_what_is_not_genuine_is_refused() -> None:
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
        ("/sk-v1.0.a.b", None),
        ("/v1/ses-0-a/x", None),
        ("/sk-v2.0.a.b/v1", None),
        ("ses-0-a/v1", None),
        ("/", None),
        ("", None),
    ],
)
def test_a_session_in_front_of_a_path(path: str, prefix: str | None) -> None:
    assert session_prefix(path) == prefix
