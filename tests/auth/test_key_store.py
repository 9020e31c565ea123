"""keys.json: what is kept of keys, by whom it may be read, and several writers at once."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from any_agent.auth.key_store import KeptScope, TenantLimits, create_key, read_keys, revoke_key
from any_agent.errors import ConfigError, NotFound, StartupError
from any_agent.keys import KEPT_PREFIXES, key_id
from tests.support.errors import fails_with


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trial" / "keys.json"


def test_a_key_is_stored_only_as_its_hash(path: Path) -> None:
    text, key = create_key(path, "tenant", tenant="alice", limits=TenantLimits(open_sessions=3))
    assert text.startswith("sk-tenant.") and key_id(text) == key.id
    assert text not in path.read_text() and text.rpartition(".")[2] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    found = read_keys(path).find(text)
    assert found == key and found.tenant == "alice" and found.limits.open_sessions == 3


@pytest.mark.parametrize("scope", ["admin", "trainer"])
def test_keys_of_scopes_other_than_tenant_have_no_tenant(path: Path, scope: KeptScope) -> None:
    text, _ = create_key(path, scope)
    assert text.startswith(KEPT_PREFIXES)
    assert read_keys(path).has_admin == (scope == "admin")
    for fields in ({"tenant": "alice"}, {"limits": TenantLimits(open_sessions=1)}):
        with pytest.raises(ConfigError):
            create_key(path, scope, **fields)  # type: ignore[arg-type]
    assert len(read_keys(path).keys) == 1


def test_a_tenant_needs_a_name(path: Path) -> None:
    for tenant in (None, "", "a b", "../x", "a" * 65, "x\n", "-x"):
        with pytest.raises(ConfigError):
            create_key(path, "tenant", tenant=tenant)
    assert not path.exists()


def test_a_text_that_is_not_the_key_is_not_found(path: Path) -> None:
    text, key = create_key(path, "admin")
    keys = read_keys(path)
    other, _ = create_key(path, "admin")
    prefix, id, secret = text.split(".")
    for wrong in (
        "",
        text[:-1],
        text + "0",
        text.upper(),
        f"{prefix}.{id}.{other.rpartition('.')[2]}",
        f"sk-trainer.{id}.{secret}",
        key.hash,
        other,
        "sk-admin.\ud800",
    ):
        assert keys.find(wrong) is None, wrong
    assert keys.find(text) == key


def test_revoked_and_expired_keys_are_void(path: Path) -> None:
    text, key = create_key(path, "admin")
    assert revoke_key(path, key.id)[1]
    assert not revoke_key(path, key.id)[1], "once"
    keys = read_keys(path)
    assert keys.find(text) is None and not keys.has_admin
    with fails_with(NotFound, "00000000"):
        revoke_key(path, "00000000")
    late, old = create_key(path, "admin", expires_in=3600)
    gone, _ = create_key(path, "admin", expires_in=1e-6)
    keys = read_keys(path)
    assert keys.find(late) == old and keys.has_admin
    while time.time() < keys.keys[-1].expires_at:  # type: ignore[operator]
        pass
    assert keys.find(gone) is None


def test_a_key_expires_while_the_machine_is_suspended(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock stands still meanwhile; the wall clock may have been set."""
    text, _ = create_key(path, "tenant", tenant="a", expires_in=3600)
    keys = read_keys(path)
    wall, monotonic, boot = time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    for asleep, found in ((3500, True), (3700, False)):
        clocks = {time.CLOCK_BOOTTIME: boot + asleep, time.CLOCK_MONOTONIC: monotonic}
        monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
        monkeypatch.setattr(time, "monotonic", lambda: monotonic)
        monkeypatch.setattr(time, "time", lambda: wall)
        assert (keys.find(text) is not None) == found, asleep
        assert (read_keys(path).find(text) is not None) == found, asleep


def test_limits_of_a_tenant_are_of_its_newest_keys(path: Path) -> None:
    _, first = create_key(path, "tenant", tenant="a", limits=TenantLimits(open_sessions=1))
    create_key(path, "tenant", tenant="a", limits=TenantLimits(requests_per_second=2.5))
    create_key(path, "tenant", tenant="b")
    limits = read_keys(path).limits
    assert limits["a"] == TenantLimits(open_sessions=1, requests_per_second=2.5)
    assert limits["b"] == TenantLimits() and "c" not in limits
    revoke_key(path, first.id)
    assert read_keys(path).limits["a"] == TenantLimits(requests_per_second=2.5)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 2, "keys": []}',
        '{"format": 1, "keys": [{"id": "secret-looking"}]}',
        '{"format": 1, "keys": [], "more": 1}',
        '{"format": 1, "keys": [{"id": "a", "scope": "admin", "created_at": 1, "hash": "no"}]}',
    ],
)
def test_a_broken_key_file_is_reported(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(0o600)
    with fails_with(StartupError, "keys.json") as error:
        read_keys(path)
    assert "secret-looking" not in error.value.message
    with pytest.raises(StartupError):
        create_key(path, "admin")
    assert path.read_text() == content, "and it is left as it is"


def test_a_key_whose_creation_cannot_be_recorded_is_not_kept(path: Path) -> None:
    create_key(path, "admin")
    before = path.read_bytes()

    def full(_: object) -> None:
        raise OSError("no space")

    with fails_with(OSError, "no space"):
        create_key(path, "admin", record=full)
    with fails_with(OSError, "no space"):
        revoke_key(path, read_keys(path).keys[0].id, record=full)
    assert path.read_bytes() == before


def make(path: Path, count: int) -> None:
    for _ in range(count):
        create_key(path, "trainer")


@pytest.mark.service
def test_simultaneous_writers_of_keys_lose_none(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=make, args=(path, 20)) for _ in range(3)]
    for writer in writers:
        writer.start()
    # Whatever is there at any moment is whole.
    seen = 0
    while any(writer.is_alive() for writer in writers):
        keys = read_keys(path)
        assert len(keys.keys) >= seen
        seen = len(keys.keys)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(read_keys(path).by_id) == 60
