"""Who is calling, by their key; open mode and its end; secrets that rotate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from any_agent.auth.access import ANYONE, NOBODY, Access, Scope, authorize, require_key, signer_of
from any_agent.auth.key_store import create_key, revoke_key
from any_agent.cli.main import main
from any_agent.cli.serve import describe_auth
from any_agent.config import Config, load_config
from any_agent.errors import ConfigError, Forbidden, StartupError, Unauthenticated
from any_agent.keys import KeySigner
from any_agent.launcher.trial import trial_dir
from any_agent.runtime.file_watcher import WatchedFile
from tests.support.errors import fails_with


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits for the time between two looks."""
    get = WatchedFile.get
    monkeypatch.setattr(WatchedFile, "get", lambda self, *, within=None: get(self, within=0.0))


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Config]:
    def make(*settings: str) -> Config:
        config = load_config(None, [f"root={tmp_path}", *settings], {})
        trial_dir(config).create()
        return config

    return make


def refused(access: Access, key: str) -> bool:
    try:
        access.caller(key)
    except Unauthenticated as error:
        assert len(key) < 8 or key not in error.message
        return True
    return False


def test_each_key_identifies_its_caller(configured: Callable[..., Config]) -> None:
    config = configured("server.admin_key=operator-secret")
    path = trial_dir(config).keys
    tenant, kept = create_key(path, "tenant", tenant="alice")
    trainer, _ = create_key(path, "trainer")
    admin, _ = create_key(path, "admin")
    access = Access(config)
    assert access.caller("") is NOBODY
    assert access.caller("operator-secret").name == "admin"
    alice = access.caller(tenant)
    assert (alice.scope, alice.tenant) == (Scope.TENANT, "alice")
    assert alice.name == f"tenant alice (key {kept.id})" and kept.id in alice.identity
    assert access.caller(trainer).scope is Scope.TRAINER
    assert access.caller(admin).scope is Scope.ADMIN
    session = access.signer.mint(0)[1]
    assert access.caller(session).scope is Scope.SESSION
    assert access.caller(access.signer.run_key).scope is Scope.TRAINER
    callers = [access.caller(k) for k in (tenant, trainer, admin, session, "operator-secret")]
    assert len({caller.identity for caller in callers}) == len(callers)
    foreign = KeySigner(bytes(32))
    theirs = [foreign.mint(0)[1], foreign.run_key]
    cut = [session[:-1], "operator-secre", "sk-tenant.", "sk-trainer.run."]
    odd = ["garbage", f"sk-admin.00000000.{'0' * 48}", "sk-trainer.run.\ud800"]
    for forged in (*theirs, *cut, *odd):
        assert refused(access, forged), forged


def test_open_mode_ends_with_the_first_admin_key(configured: Callable[..., Config]) -> None:
    config = configured()
    path = trial_dir(config).keys
    access = Access(config)
    assert access.open_mode and access.caller("") is access.caller("DUMMY") is ANYONE
    tenant, _ = create_key(path, "tenant", tenant="alice")
    assert access.open_mode, "a tenant's key closes nothing"
    assert access.caller(tenant).tenant == "alice"
    assert refused(access, "sk-tenant.nonsense"), "what looks like a key is one, or forged"
    admin, kept = create_key(path, "admin")
    assert not access.open_mode
    assert access.caller("") is NOBODY and refused(access, "DUMMY")
    assert access.caller(admin).scope is Scope.ADMIN
    revoke_key(path, kept.id)
    assert refused(access, admin)
    assert not access.open_mode, "a process that was closed stays so"
    assert Access(config).open_mode


def test_an_admin_key_that_runs_out_opens_nothing(configured: Callable[..., Config]) -> None:
    """Not at the next start either, nor when a part is restarted."""
    config = configured()
    path = trial_dir(config).keys
    key, kept = create_key(path, "admin", expires_in=1e-6)
    until_expired = Access(config)
    assert refused(until_expired, key) and not until_expired.open_mode
    assert not Access(config).open_mode and Access(config).caller("") is NOBODY
    revoke_key(path, kept.id)
    assert Access(config).open_mode, "somebody said so"


def test_others_are_served_with_an_admin_key_only(configured: Callable[..., Config]) -> None:
    config = configured()
    path = trial_dir(config).keys
    for host in ("127.0.0.1", "localhost", "::1"):
        require_key(config, host)
    create_key(path, "tenant", tenant="alice")
    create_key(path, "trainer")
    create_key(path, "admin", expires_in=1e-9)
    for host in ("0.0.0.0", "10.1.2.3", "::"):
        with fails_with(ConfigError, "server.admin_key"):
            require_key(config, host)
        require_key(configured("server.admin_key=operator-secret"), host)
    create_key(path, "admin")
    require_key(config, "0.0.0.0")
    assert not Access(configured("server.host=0.0.0.0", "trial=other")).open_mode


def test_broken_keys_open_nothing(configured: Callable[..., Config]) -> None:
    config = configured()
    path = trial_dir(config).keys
    key, _ = create_key(path, "admin")
    access = Access(config)
    path.write_text("{")
    assert access.caller(key).scope is Scope.ADMIN
    path.unlink()
    assert access.caller(key).scope is Scope.ADMIN and not access.open_mode
    path.write_text("{")
    path.chmod(0o600)
    with fails_with(StartupError, "keys.json"):
        Access(config)


def test_secrets_rotate_while_the_service_runs(configured: Callable[..., Config]) -> None:
    config = configured()
    run_dir = trial_dir(config)
    rotate = ["keys", "rotate", f"root={config.root}"]
    proxy, trainer = Access(config), signer_of(run_dir)
    lane, first = proxy.signer.mint(1)
    before = trainer.run_key
    assert main(rotate) == 0
    second = proxy.signer.key_of(lane)
    assert second != first and list(proxy.signer.keys_of(lane)) == [second, first]
    assert proxy.signer.verify(first) == proxy.signer.verify(second) == lane
    assert proxy.caller(before) == proxy.caller(trainer.run_key)
    assert trainer.run_key != before
    assert main([*rotate, "--drop-old"]) == 0
    assert refused(proxy, first) and refused(proxy, second) and refused(proxy, before)
    assert proxy.caller(trainer.run_key).scope is Scope.TRAINER
    assert run_dir.secret.stat().st_mode & 0o777 == 0o600
    assert [main(rotate) for _ in range(8)] == [0] * 7 + [1], "so many are kept"
    assert len(run_dir.signing_secrets()) == 8


def test_without_a_scope_nothing_is_allowed() -> None:
    authorize({Scope.ADMIN}, ANYONE)
    with fails_with(Unauthenticated, "admin or trainer"):
        authorize({Scope.ADMIN, Scope.TRAINER}, NOBODY)
    with fails_with(Forbidden, "admin", "trainer"):
        authorize({Scope.TRAINER}, ANYONE)


def test_the_start_message_says_whether_keys_are_required(
    configured: Callable[..., Config],
) -> None:
    assert "API keys are required" in describe_auth(configured("server.admin_key=operator-secret"))
    config = configured("trial=second")
    assert "is an operator" in describe_auth(config) and "trial=second" in describe_auth(config)
    create_key(trial_dir(config).keys, "admin")
    assert "API keys are required" in describe_auth(config)
