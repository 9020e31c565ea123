"""A folder that another user prepared where a run will be: refused by name, and nothing is lost."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from any_agent.auth.access import Access, run_dir_of
from any_agent.auth.key_store import create_key, locked, read_keys
from any_agent.cli.main import main
from any_agent.config import Config, load_config
from any_agent.errors import ConfigError, Unauthenticated
from any_agent.rundir.layout import RunDir

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can prepare files of another user"
)
OTHER = pwd.getpwnam("nobody")
CONTENT = "what the victim has written"


@dataclass
class Place:
    """A root that users share, the run that the victim will start there, and a file of theirs."""

    run: RunDir
    victim: Path

    @property
    def root(self) -> Path:
        return self.run.path.parents[2]

    def named(self) -> list[str]:
        return [f"root={self.root}", "user=me", "experiment=e", "trial=t"]

    def config(self) -> Config:
        return load_config(None, self.named())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o1777)
    victim = tmp_path / "victim.txt"
    victim.write_text(CONTENT)
    return Place(RunDir.of(root, "me", "e", "t"), victim)


def theirs(path: Path) -> Path:
    os.chown(path, OTHER.pw_uid, OTHER.pw_gid, follow_symlinks=False)
    return path


def open_to_all(path: Path) -> Path:
    path.chmod(0o777)
    return path


def folders(place: Place) -> Path:
    """Make the run's folder and those above."""
    run = place.run.path
    for path in (run.parents[1], run.parents[0], run):
        path.mkdir(mode=0o700)
    return run


def registry(place: Place) -> Path:
    path = folders(place) / "registry"
    path.mkdir(mode=0o700)
    return path


def run_that_is_a_link(place: Place) -> Path:
    folders(place).rmdir()
    (place.victim.parent / "own").mkdir(mode=0o700)
    place.run.path.symlink_to(place.victim.parent / "own")
    return place.run.path


def link(name: str, place: Place) -> Path:
    path = folders(place) / name
    path.symlink_to(place.victim)
    return theirs(path)


def file(name: str, place: Place) -> Path:
    path = folders(place) / name
    path.write_text("00" * 32 if name == "secret.key" else "{}")
    path.chmod(0o600)
    return theirs(path)


LINKS = """lock trainer.lock keys.json.lock keys.json secret.key config.yaml registry
    metrics.jsonl"""
PREPARED: dict[str, Callable[[Place], Path]] = {
    "run": lambda place: theirs(folders(place)),
    "experiment": lambda place: theirs(folders(place).parent),
    "user": lambda place: theirs(folders(place).parents[1]),
    "root": lambda place: theirs(place.root),
    "root without the sticky bit": lambda place: open_to_all(place.root),
    "link in place of the run": lambda place: theirs(run_that_is_a_link(place)),
    "own link in place of the run": run_that_is_a_link,
    "run that all may write": lambda place: open_to_all(folders(place)),
    "registry": lambda place: theirs(registry(place)),
    "registry that all may write": lambda place: open_to_all(registry(place)),
    **{f"link {name}": partial(link, name) for name in LINKS.split()},
    **{
        f"file {name}": partial(file, name)
        for name in ("keys.json", "secret.key", "config.yaml", "fleet.json")
    },
}


@pytest.mark.parametrize("what", PREPARED)
def test_a_prepared_run_is_refused_by_name(
    place: Place, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = PREPARED[what](place)
    owner = pwd.getpwuid(named.lstat().st_uid).pw_name
    before = _all(place)
    for command in ("serve --no-train", "config", "keys create --scope admin", "ranks list"):
        assert main([*command.split(), *place.named()]) == 2, command
        said = capsys.readouterr().err
        assert f"{named} " in said and owner in said and "root=" in said
    with pytest.raises(ConfigError):
        place.run.create()
    assert _all(place) == before, "no byte is another, of theirs or of ours"


@pytest.mark.parametrize("name", ["lock", "trainer.lock", "keys.json.lock"])
@pytest.mark.parametrize("owner", [0, OTHER.pw_uid])
def test_no_lock_follows_a_link(place: Place, name: str, owner: int) -> None:
    """Also where the link comes after all checks of the folder."""
    place.run.create()
    (place.run.path / name).symlink_to(place.victim)
    os.chown(place.run.path / name, owner, 0, follow_symlinks=False)
    use: dict[str, Callable[[], object]] = {
        "lock": lambda: place.run.lock().__enter__(),
        "trainer.lock": lambda: place.run.next_epoch(0),
        "keys.json.lock": lambda: locked(place.run.keys).__enter__(),
    }
    with pytest.raises(ConfigError):
        use[name]()
    if name == "lock":
        with pytest.raises(ConfigError):
            place.run.in_use()
    assert place.victim.read_text() == CONTENT


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_keys_of_another_user_open_nothing(place: Place, mode: int) -> None:
    """Also where they come while a service runs, and where it was open until then."""
    config = place.config()
    place.run.create()
    access = Access(config)
    elsewhere = RunDir(place.victim.parent / "elsewhere")
    key, _ = create_key(elsewhere.keys, "admin")
    elsewhere.keys.rename(place.run.keys)
    place.run.keys.chmod(mode)
    theirs(place.run.keys)
    with pytest.raises(Unauthenticated):
        access.caller(key)
    with pytest.raises(ConfigError):
        Access(config)
    with pytest.raises(ConfigError):
        read_keys(place.run.keys)


def test_a_secret_that_others_know_signs_nothing(place: Place) -> None:
    place.run.create()
    place.run.signing_secrets()
    place.run.secret.chmod(0o640)
    with pytest.raises(ConfigError) as refused:
        place.run.signing_secrets()
    assert "chmod go-rwx" in refused.value.message
    place.run.secret.chmod(0o600)
    theirs(place.run.secret)
    with pytest.raises(ConfigError):
        place.run.signing_secrets()


def test_what_users_share_may_be_roots_and_sticky(place: Place) -> None:
    """`/tmp` is such a folder, and so is a link that leads from where runs are to a larger disk."""
    place.run.create()
    shared = place.root
    elsewhere = shared.with_name("disk")
    shared.rename(elsewhere)
    shared.symlink_to(elsewhere)
    place.run.create()
    assert run_dir_of(place.config()).path == place.run.path


def test_what_the_owner_linked_to_another_disk_stays(place: Place) -> None:
    place.run.create()
    elsewhere = place.victim.parent / "large disk"
    place.run.checkpoints.rename(elsewhere)
    place.run.checkpoints.symlink_to(elsewhere)
    place.run.logs.chmod(0o750)
    place.run.create()


def _all(place: Place) -> dict[Path, tuple[int, int, int, bytes]]:
    """Return owner, mode, time and content of everything."""
    found: dict[Path, tuple[int, int, int, bytes]] = {}
    for path in place.victim.parent.rglob("*"):
        one = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[path] = (one.st_uid, one.st_mode, one.st_mtime_ns, content)
    return found
