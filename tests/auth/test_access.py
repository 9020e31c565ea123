"""Who is calling, by their key; open mode and its end; secrets that rotate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from any_agent.auth.access import ANYONE, NOBODY, Access, Scope, authorize, require_key, signer_of
from any_agent.auth.key_store import create_key, revoke_key
from any_agent.cli.keys import run as run_keys
from any_agent.cli.serve import _describe_auth
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


def is_open(access: Access) -> bool:
    return access.open_mode


def test_each_key_says_who(configured: Callable[..., Config]) -> None:
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
    for forged in (
        "garbage",
        "operator-secre",
        foreign.mint(0)[1],
        foreign.run_key,
        session[:-1],
        tenant[:-1] + ("0" if tenant[-1] != "0" else "1"),
        "sk-tenant.",
        "sk-admin.00000000." + "0" * 48,
        "sk-trainer.run.",
        "sk-trainer.run.\ud800",
    ):
        assert refused(access, forged), forged


def test_open_mode_ends_with_the_first_admin_key(configured: Callable[..., Config]) -> None:
    config = configured()
    path = trial_dir(config).keys
    access = Access(config)
    assert is_open(access) and access.caller("") is access.caller("DUMMY") is ANYONE
    tenant, _ = create_key(path, "tenant", tenant="alice")
    assert is_open(access), "a tenant's key closes nothing"
    assert access.caller(tenant).tenant == "alice"
    assert refused(access, "sk-tenant.nonsense"), "what looks like a key is one, or forged"
    admin, kept = create_key(path, "admin")
    assert not is_open(access)
    assert access.caller("") is NOBODY and refused(access, "DUMMY")
    assert access.caller(admin).scope is Scope.ADMIN
    revoke_key(path, kept.id)
    assert refused(access, admin)
    assert not is_open(access), "a process that was closed stays so"
    assert is_open(Access(config))


def test_an_admin_key_that_runs_out_opens_nothing(configured: Callable[..., Config]) -> None:
    """Not at the next start either, nor when a part is restarted."""
    config = configured()
    path = trial_dir(config).keys
    key, kept = create_key(path, "admin", expires_in=1e-6)
    until_expired = Access(config)
    assert refused(until_expired, key) and not is_open(until_expired)
    assert not is_open(Access(config)) and Access(config).caller("") is NOBODY
    revoke_key(path, kept.id)
    assert is_open(Access(config)), "somebody said so"


def test_a_service_for_others_is_never_open(configured: Callable[..., Config]) -> None:
    assert not Access(configured("server.host=0.0.0.0")).open_mode


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


def test_broken_keys_open_nothing(configured: Callable[..., Config]) -> None:
    config = configured()
    path = trial_dir(config).keys
    key, _ = create_key(path, "admin")
    access = Access(config)
    path.write_text("{")
    assert access.caller(key).scope is Scope.ADMIN
    path.unlink()
    assert access.caller(key).scope is Scope.ADMIN and not is_open(access)
    path.write_text("{")
    path.chmod(0o600)
    with fails_with(StartupError, "keys.json"):
        Access(config)


def keys_command(config: Config, *arguments: str) -> int:
    from any_agent.cli.main import _parser

    return run_keys(_parser().parse_args(["keys", *arguments, f"root={config.root}"]))


def test_secrets_rotate_while_the_service_runs(configured: Callable[..., Config]) -> None:
    config = configured()
    run_dir = trial_dir(config)
    proxy, trainer = Access(config), signer_of(run_dir)
    lane, first = proxy.signer.mint(1)
    before = trainer.run_key
    assert keys_command(config, "rotate") == 0
    second = proxy.signer.key_of(lane)
    assert second != first and list(proxy.signer.keys_of(lane)) == [second, first]
    assert proxy.signer.verify(first) == proxy.signer.verify(second) == lane
    assert proxy.caller(before) == proxy.caller(trainer.run_key)
    assert trainer.run_key != before
    assert keys_command(config, "rotate", "--drop-old") == 0
    assert refused(proxy, first) and refused(proxy, second) and refused(proxy, before)
    assert proxy.caller(trainer.run_key).scope is Scope.TRAINER
    assert run_dir.secret.stat().st_mode & 0o777 == 0o600
    for _ in range(7):
        keys_command(config, "rotate")
    with fails_with(StartupError, "--drop-old"):
        keys_command(config, "rotate")
    assert len(run_dir.signing_secrets()) == 8


def test_without_a_scope_nothing_is_allowed() -> None:
    authorize({Scope.ADMIN}, ANYONE)
    with fails_with(Unauthenticated, "admin or trainer"):
        authorize({Scope.ADMIN, Scope.TRAINER}, NOBODY)
    with fails_with(Forbidden, "admin", "trainer"):
        authorize({Scope.TRAINER}, ANYONE)


def test_damaged_keys_are_told_though_nobody_uses_one(
    configured: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    """A closed service whose agents have session keys never asks for the kept ones."""
    config = configured("server.admin_key=operator-secret")
    create_key(trial_dir(config).keys, "admin")
    access = Access(config)
    trial_dir(config).keys.write_text("{broken")
    for _ in range(3):
        access.refresh()
    assert len([r for r in caplog.records if "keeping its earlier content" in r.getMessage()]) == 1


def test_what_a_start_says_of_keys(configured: Callable[..., Config]) -> None:
    assert "API keys are required" in _describe_auth(configured("server.admin_key=operator-secret"))
    config = configured("trial=second")
    assert "is an operator" in _describe_auth(config) and "trial=second" in _describe_auth(config)
    create_key(trial_dir(config).keys, "admin")
    assert "API keys are required" in _describe_auth(config)
