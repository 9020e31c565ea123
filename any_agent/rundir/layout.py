"""The folder of a run: ``<root>/<user>/<experiment>/<trial>/``, which only its owner can read.

::

    config.yaml       the settings of the last start of training, without secrets
    resolved.yaml     the settings of the last start, for its processes
    secret.key        signs session keys, one secret a line, the first one signs
    engine-key.yaml   the key of the engines of this start
    keys.json         the keys of operators, trainers and tenants, hashed
    audit/            changes to the run and to sessions, and refusals, with their callers
    trainer.epoch     the number of the trainer's latest start
    lock              a file that is locked while a service uses the folder
    format            the layout's number, so that another version's folder is refused by name
    registry/         the addresses of the live parts, written by each part itself
    fleet.json        the ranks that serve, drain and have served
    fleet/            commands of `any-agent ranks` to the service that runs, and its answers
    state.json        the highest version ever published, the steps done
    metrics.jsonl     one line per training step
    tracking/         what trackers have got, and their own files (`tracking.to`)
    journal/          the durable record of each rank's sessions, unless `server.journal_dir` is
                      another place
    archive/          sessions that ended long ago, compressed; `any-agent export` reads them
    manifests/        what each training step consumed, written before the step
    weights/          published versions, v00000001 ...
    adapters/         the same of a run that trains an adapter of a shared engine
    checkpoints/      step-00000010 ..., and `latest`
    logs/             one file per process
    shared            a token by which a job's nodes recognise the folder
    waiting.txt       the condition that the trainer has been waiting for, after a minute
    url               the URL for agents of the service that runs now, or ran last
"""

from __future__ import annotations

import difflib
import fcntl
import json
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlencode

from any_agent.errors import ConfigError, NotFound, StartupError
from any_agent.runtime.atomic_files import (
    create_once,
    make_folder,
    make_shared_folder,
    write_atomic,
)
from any_agent.runtime.file_owner import (
    access_required,
    own_file,
    require_own_entries,
    require_own_folder,
    require_safe_parents,
    secret_file,
)

JOURNAL_SUFFIX = ".sqlite"
LOGGED_SCHEME = "sqlite+redis"
"""Scheme of the URL of a journal with a log in Redis."""
_STEP = r"step-(\d{8,})"  # the name of a checkpoint's folder
_PREDECESSOR_TIMEOUT = 5.0  # seconds for the processes of a killed service to end
_MAX_NAMES = 12  # the most trials that an error lists
FORMAT = 2  # the version of the folder's layout and of the meaning of its files


def weights_folder(root: Path, version: int) -> Path:
    """Return the folder of a published version's weights in ``root``, a :attr:`RunDir.weights`."""
    return root / f"v{version:08d}"


def published_versions(root: Path) -> list[int]:
    """Return the versions in ``root``, a :attr:`RunDir.weights`, ascending."""
    return list(numbered(root, r"v(\d{8,})"))


def checkpoint_folder(root: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint in ``root``, a :attr:`RunDir.checkpoints`."""
    return root / f"step-{step:08d}"


def saved_steps(root: Path) -> dict[int, Path]:
    """Return the checkpoints in ``root``, a :attr:`RunDir.checkpoints`, by step, ascending.

    Some may be incomplete; see :func:`checkpoint_problem`.
    """
    return numbered(root, _STEP)


def latest_step(root: Path) -> int | None:
    """Return the step of the checkpoint that `latest` in ``root`` names; None for no such name."""
    try:
        name = (root / "latest").read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    match = re.fullmatch(_STEP, name)
    return int(match[1]) if match else None


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Return a folder's entries whose names match by the number in the name, ascending."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = {int(match[1]): path for path in paths if (match := re.fullmatch(pattern, path.name))}
    return dict(sorted(found.items()))


class _Below:
    """The path of a file or folder in a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDir, kind: type[RunDir]) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one trial."""

    path: Path
    journals: Path | None = None
    """The folder of its journals, if that is not in its own folder."""

    weights = _Below("weights")
    adapters = _Below("adapters")
    checkpoints = _Below("checkpoints")
    manifests = _Below("manifests")
    logs = _Below("logs")
    registry = _Below("registry")
    fleet = _Below("fleet.json")
    fleet_commands = _Below("fleet")
    metrics = _Below("metrics.jsonl")
    waiting = _Below("waiting.txt")
    resolved = _Below("resolved.yaml")
    shared = _Below("shared")
    url = _Below("url")
    state = _Below("state.json")
    archive = _Below("archive")
    _format = _Below("format")
    secret = _Below("secret.key")
    engine_key = _Below("engine-key.yaml")
    keys = _Below("keys.json")
    audit = _Below("audit")

    @classmethod
    def of(
        cls, root: Path, user: str, experiment: str, trial: str, journal_dir: Path | None = None
    ) -> RunDir:
        """Return a trial's paths; with ``journal_dir``, its journals lie below that folder."""
        names = Path(user, experiment, trial)
        journals = None if journal_dir is None else _absolute(journal_dir) / names
        return cls(_absolute(root) / names, journals)

    @property
    def full_name(self) -> str:
        """`USER/EXPERIMENT/TRIAL`, the prefix of the run's names outside its folder."""
        return "/".join(self.path.parts[-3:])

    def journal(self, rank: int) -> Path:
        return (self.journals or self.path / "journal") / f"rank-{rank}{JOURNAL_SUFFIX}"

    def journal_url(self, rank: int) -> str:
        """Return the URL of a rank's journal, as `proxy_ext.journal.open_journal` takes it."""
        return f"sqlite://{quote(str(self.journal(rank).absolute()))}"

    def log_note(self, rank: int) -> Path:
        """Return the path of the note that a rank's journal has a log in Redis."""
        return self.path / "journal" / f"rank-{rank}.log.json"

    def logged_journal_url(
        self, rank: int, server: str, *, lease: float, durability: str, replicas: int
    ) -> str:
        """Return the URL of a journal with a log in Redis, at a server's URL."""
        own = {
            "server": server,
            "name": f"{self.full_name}/rank-{rank}",
            "file": self.journal(rank).absolute(),
            "snapshots": (self.path / "journal").absolute(),
            "note": self.log_note(rank).absolute(),
            "lease": lease,
            "durability": durability,
            "replicas": replicas,
        }
        return f"{LOGGED_SCHEME}:///?{urlencode(own)}"

    def create(self) -> None:
        """Create what is missing.

        Raises ConfigError for a folder of another layout, or of another user.
        """
        self.check_format()
        with access_required():
            self._make()
            # Again, because another user may have been quicker.
            self._require_own()
            folders = (self.weights, self.checkpoints, self.manifests, self.registry)
            for folder in (*folders, self.archive, self.logs):
                make_folder(folder)
            self.make_journals()
            if not self._format.exists():
                create_once(self._format, f"{FORMAT}\n")

    def _make(self) -> None:
        make_shared_folder(self.path.parent)
        make_folder(self.path)

    def _require_own(self) -> None:
        """Raise ConfigError for a folder that another user owns, prepared, or can replace."""
        require_own_folder(self.path)
        require_safe_parents(self.path.parents[:3])
        require_own_entries(self.path)
        require_own_folder(self.registry, private=True)

    def make_journals(self) -> None:
        """Create the journals' folder; ConfigError for one that another user could replace."""
        folder = self.journal(0).parent
        if self.journals is None:
            make_folder(folder)
            return
        mine = "server.journal_dir, such as /var/tmp/any-agent-$USER"
        try:
            make_shared_folder(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the journals' folder {folder} cannot be created ({error.strerror}): choose a "
                f"folder of your own by {mine}"
            ) from None
        require_own_folder(folder, place=mine)
        require_safe_parents(folder.parents[:3], place=mine)
        require_own_entries(folder, place=mine)

    def check_format(self) -> None:
        """Raise ConfigError for a run of another layout, or of another user."""
        with access_required():
            self._require_own()
            found = self._found_format()
        if found is not None and found != str(FORMAT):
            raise ConfigError(
                f"{self.path} is of format {found[:20]!r}, this version reads {FORMAT}; choose "
                "another --trial, or use the version of any-agent that wrote it"
            )

    def _found_format(self) -> str | None:
        """Return the layout's number; 1 for a run without the file, None where there is no run."""
        if self._format.exists():
            return self._format.read_text(encoding="utf-8", errors="replace").strip()
        # Journals in another folder may belong to a removed run of this name.
        old = (self.path / "config.yaml").exists() or RunDir(self.path).journal(0).exists()
        return "1" if old else None

    def no_trial(self, remedy: str) -> NotFound:
        """Return the error for a trial that does not exist; it lists those that there are, the ones
        of like names first."""
        root = self.path.parents[2]
        found = {
            f"{path.parts[-2]}/{path.parts[-1]} (user {path.parts[-3]})"
            for path in root.glob("*/*/*")
            if any((path / name).is_file() for name in ("config.yaml", "keys.json", "format"))
        }
        user, experiment, trial = self.path.parts[-3:]
        wanted = f"{experiment}/{trial} (user {user})"
        near = difflib.get_close_matches(wanted, found, n=_MAX_NAMES)
        names = [*near, *sorted(found - {*near})]
        listed = ", ".join(names[:_MAX_NAMES]) or "no trials"
        more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return NotFound(
            f"there is no trial {experiment}/{trial} in {self.path}: in {root} there are "
            f"{listed}{more}; {remedy}"
        )

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Lock the folder for one service; StartupError if another service has it.

        Yields the locked file's descriptor; processes that inherit it keep the lock. Those of a
        killed service are waited for, as they may take a moment to end.
        """
        with open(self.path / "lock", "a", opener=own_file) as file:
            deadline = time.monotonic() + _PREDECESSOR_TIMEOUT
            while not locked(file):
                if time.monotonic() >= deadline:
                    raise StartupError(
                        f"another service is using {self.path}; stop it, or choose another trial"
                    )
                time.sleep(0.1)
            yield file.fileno()

    def in_use(self) -> bool:
        """Return whether a service uses the folder now, on this machine or on one that shares it.

        A lock is taken for a moment; a service that starts meanwhile tries again.
        """
        if not self.path.is_dir():
            return False
        with open(self.path / "lock", "a", opener=own_file) as file:
            return not locked(file)

    def next_epoch(self, seen: int) -> int:
        """Return a number above that of every earlier start of the trainer, stored durably.

        The ranks distinguish trainers by it. ``seen`` is the highest number that their journals
        have, so that a file that is gone, or damaged, changes nothing.
        """
        path = self.path / "trainer.epoch"
        with open(self.path / "trainer.lock", "a", opener=own_file) as file:
            # Even two trainers that run at once get two numbers.
            fcntl.flock(file, fcntl.LOCK_EX)
            text = path.read_text("ascii", "replace").strip() if path.exists() else "0"
            stored = int(text) if re.fullmatch("[0-9]{1,15}", text) else 0
            epoch = max(stored, seen) + 1
            write_atomic(path, f"{epoch}\n")
        return epoch

    def signing_secrets(self) -> Sequence[bytes]:
        """Return the secrets behind session keys: the first one signs, all of them verify.

        The first call creates one.
        """
        if not self.secret.exists():
            self._make()
            # Written completely or not at all: keys signed with half a secret could be forged.
            create_once(self.secret, secrets.token_hex(32))
        try:
            with open(self.secret, "rb", opener=secret_file) as file:
                return parse_secrets(file.read())
        except ValueError:
            raise StartupError(
                f"{self.secret} holds no secret; delete it, which makes the session keys of this "
                "trial invalid"
            ) from None

    def signing_secret(self) -> bytes:
        """Return the secret that signs."""
        return self.signing_secrets()[0]


def _absolute(path: Path) -> Path:
    return Path(path).expanduser().absolute()


def parse_secrets(content: bytes) -> Sequence[bytes]:
    """Parse the secrets in `secret.key`, one on each line; ValueError for anything else."""
    lines = content.decode("ascii", errors="replace").split()
    if not lines or any(re.fullmatch("[0-9a-f]{64}", line) is None for line in lines):
        raise ValueError("each line must be a secret of 64 hexadecimal digits")
    return tuple(map(bytes.fromhex, lines))


def write_json(path: Path, data: Any) -> None:
    """Replace a JSON file durably; a reader sees the old or the new one."""
    write_atomic(path, json.dumps(data))


def read_json(path: Path, default: Any = None) -> Any:
    """Return a JSON file's data, or ``default`` without a file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default


def checkpoint_problem(folder: Path) -> str | None:
    """Return why a folder is not a complete checkpoint, else None. Its manifest is written last."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        sizes: dict[str, int] = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest cannot be read ({error})"
    if not sizes:
        return "its manifest names no files"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def locked(file: IO[str]) -> bool:
    """Lock an open file; return False if it is locked already.

    Raises StartupError on a file system without locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StartupError(
            f"{file.name} cannot be locked ({error.strerror}): choose a root on a file system with "
            "locks (Lustre: mounted with flock)"
        ) from None
    return True
