"""Where the files of a run lie: ``<root>/<user>/<experiment>/<trial>/``.

::

    config.yaml       the settings that training was last started with, without secrets
    resolved.yaml     those of the last start, for its processes
    secret.key        signs session keys, one secret a line, the first one signs; mode 0600
    keys.json         the keys of operators, trainers and tenants, hashed; mode 0600
    audit/            who did what to the run and to sessions, and who was refused
    trainer.epoch     how often training was started
    lock              held while a service uses the folder
    format            the layout's number, so that another version's folder is refused by name
    registry/         who serves where, written by each part itself
    state.json        the highest version ever published, the steps done
    metrics.jsonl     one line per training step
    journal/          the durable record of each rank's sessions, unless `server.journal_dir` is
                      another place; mode 0700
    archive/          sessions that ended long ago, compressed; `any-agent export` reads them; 0700
    manifests/        what each training step consumed, written before the step
    weights/          published versions, v00000001 ...
    checkpoints/      step-00000010 ..., and `latest`
    logs/             one file per process; mode 0700
    shared            what a job's nodes know the folder by
    url               where agents reach the service that runs now, or ran last
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from any_agent.errors import ConfigError, StartupError
from any_agent.runtime.atomic_files import fsync, write_atomic

JOURNAL_SUFFIX = ".sqlite"
FORMAT = 2
"""Of the folder's layout and of what its files mean."""


def weights_folder(root: Path, version: int) -> Path:
    """Where a published version's weights lie in ``root``, a :attr:`RunDir.weights`."""
    return root / f"v{version:08d}"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one trial."""

    path: Path
    journals: Path | None = None
    """Where its journals lie, if not in its own folder."""

    @classmethod
    def of(
        cls, root: Path, user: str, experiment: str, trial: str, journal_dir: Path | None = None
    ) -> RunDir:
        """``journal_dir`` is to `journals` as ``root`` is to `path`."""
        names = Path(user, experiment, trial)
        journals = None if journal_dir is None else _absolute(journal_dir) / names
        return cls(_absolute(root) / names, journals)

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def manifests(self) -> Path:
        return self.path / "manifests"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def registry(self) -> Path:
        return self.path / "registry"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def waiting(self) -> Path:
        """What the trainer has been waiting for, in its words, where that took a minute."""
        return self.path / "waiting.txt"

    @property
    def resolved(self) -> Path:
        return self.path / "resolved.yaml"

    @property
    def shared(self) -> Path:
        return self.path / "shared"

    @property
    def url(self) -> Path:
        return self.path / "url"

    @property
    def state(self) -> Path:
        return self.path / "state.json"

    @property
    def archive(self) -> Path:
        return self.path / "archive"

    def journal(self, rank: int) -> Path:
        return (self.journals or self.path / "journal") / f"rank-{rank}{JOURNAL_SUFFIX}"

    def journal_url(self, rank: int) -> str:
        """Return the URL of a rank's journal, as `proxy_ext.journal.open_journal` takes it."""
        return f"sqlite://{quote(str(self.journal(rank).absolute()))}"

    def create(self) -> None:
        """Make what is missing; ConfigError for a folder of another layout."""
        self.check_format()
        for folder in (self.weights, self.checkpoints, self.manifests, self.registry):
            folder.mkdir(parents=True, exist_ok=True)
        # What agents and models said is nobody else's on this machine, unless its owner says so.
        self.make_journals()
        for folder in (self.archive, self.logs):
            folder.mkdir(mode=0o700, exist_ok=True)
        if not self._format.exists():
            write_atomic(self._format, f"{FORMAT}\n")

    def make_journals(self) -> None:
        """Their folder. Elsewhere than in the run's own it is on a disk that others use, too: it
        must be this user's, and written by nobody else; ConfigError."""
        folder = self.journal(0).parent
        mine = "set server.journal_dir to a folder of your own, such as /var/tmp/any-agent-$USER"
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            if self.journals is None:
                raise
            raise ConfigError(
                f"the journals' folder {folder} cannot be made ({error.strerror}): {mine}"
            ) from None
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if self.journals is not None and (not ours or found.st_mode & 0o022):
            raise ConfigError(
                f"the journals' folder {folder} is not yours, or others may write in it: {mine}"
            )

    @property
    def _format(self) -> Path:
        return self.path / "format"

    def check_format(self) -> None:
        """ConfigError for a folder that holds a run of another layout.

        One without the file was written before there were formats.
        """
        if self._format.exists():
            found = self._format.read_text(encoding="utf-8", errors="replace").strip()
        elif (self.path / "config.yaml").exists() or RunDir(self.path).journal(0).exists():
            # Journals elsewhere may be those of a run of this name that was removed.
            found = "1"
        else:
            return
        if found != str(FORMAT):
            raise ConfigError(
                f"{self.path} is of format {found[:20]!r}, this version reads {FORMAT}; choose "
                "another --trial, or go on with the version of any-agent that wrote it"
            )

    @contextmanager
    def lock(self) -> Iterator[int]:
        """Hold the folder for one service; StartupError if another one has it.

        Yields the locked file's descriptor; processes that inherit it hold the lock, too.
        """
        with open(self.path / "lock", "w") as file:
            if not locked(file):
                raise StartupError(
                    f"another service is using {self.path}; stop it, or choose another trial"
                )
            yield file.fileno()

    def next_epoch(self) -> int:
        """The number of a start of the trainer, above every earlier one; on disk when it returns.

        By it the ranks tell a trainer from the ones before it. Whoever removes the file removes
        the ranks' journals, too, or counts on from what they have heard of.
        """
        path = self.path / "trainer.epoch"
        with open(self.path / "trainer.lock", "w") as file:
            # Two trainers of one trial are one too many, but never one number.
            fcntl.flock(file, fcntl.LOCK_EX)
            text = path.read_text(encoding="utf-8") if path.exists() else "0"
            if not text.strip().isdecimal():
                raise StartupError(f"{path} holds no number")
            epoch = int(text) + 1
            write_atomic(path, f"{epoch}\n")
        return epoch

    @property
    def secret(self) -> Path:
        return self.path / "secret.key"

    @property
    def keys(self) -> Path:
        return self.path / "keys.json"

    @property
    def audit(self) -> Path:
        return self.path / "audit"

    def signing_secrets(self) -> Sequence[bytes]:
        """The secrets behind session keys: the first one signs, all of them verify.

        One is made at the first call; the file is the owner's alone.
        """
        if not self.secret.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            # Whole or not at all: keys signed with half a secret could be forged.
            fd, temporary = tempfile.mkstemp(prefix="secret.", dir=self.path)
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(32))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(temporary, self.secret)
            os.unlink(temporary)
            fsync(self.path)
        try:
            return parse_secrets(self.secret.read_bytes())
        except ValueError:
            raise StartupError(
                f"{self.secret} holds no secret; delete it, and the session keys of this trial "
                "are void"
            ) from None

    def signing_secret(self) -> bytes:
        """The one that signs."""
        return self.signing_secrets()[0]


def _absolute(path: Path) -> Path:
    return Path(path).expanduser().absolute()


def parse_secrets(content: bytes) -> Sequence[bytes]:
    """Secrets as `secret.key` holds them, one a line; ValueError for anything else."""
    lines = content.decode("ascii", errors="replace").split()
    if not lines or any(re.fullmatch("[0-9a-f]{64}", line) is None for line in lines):
        raise ValueError("not one secret of 64 hexadecimal digits a line")
    return tuple(map(bytes.fromhex, lines))


def write_json(path: Path, data: Any) -> None:
    """Replace a JSON file: durable, and never seen half-written."""
    write_atomic(path, json.dumps(data))


def read_json(path: Path, default: Any = None) -> Any:
    """A JSON file's data, or ``default`` where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return default


def checkpoint_problem(folder: Path) -> str | None:
    """Why this folder is not a whole checkpoint; None if it is. Its manifest is written last."""
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
    """Lock an open file unless somebody else has. StartupError where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StartupError(
            f"{file.name} cannot be locked ({error.strerror}): choose a root on a file system that "
            "has locks (Lustre: mounted with flock)"
        ) from None
    return True
