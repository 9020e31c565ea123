"""What a run consists of, and under which names the service knows its parts.

Names follow from the run's own and a place in it, so that a runner that is started again after a
crash asks the service for the same things, and gets the same answers.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from any_agent.config import NAME_PATTERN
from any_agent.data.files import read_file
from any_agent.data.rows import as_dataset
from any_agent.errors import DatasetError

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST = 64


@dataclass(frozen=True, slots=True, order=True)
class RunId:
    """One run of the agent: what there is to be one trained session of."""

    epoch: int
    item: int
    member: int


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """What makes a run another one: its file's first line."""

    run: str
    data: str
    """A fingerprint of the items."""
    items: int
    group_size: int
    mode: str
    service: str
    """experiment/trial: another service knows nothing of these sessions."""
    agent: str = ""
    """If that was said."""

    def as_dict(self) -> dict[str, Any]:
        return {"any_agent_run": 1, **asdict(self)}


class ItemSource:
    """The items of a dataset, however it was given, and their fingerprint."""

    def __init__(self, dataset: Any) -> None:
        """DatasetError, naming the file and the line, for what is no dataset."""
        if isinstance(dataset, str | Path):
            self._items: Sequence[Any] = read_file(_there(Path(dataset)))
            if not len(self._items):
                raise DatasetError(f"{dataset} has no items")
        elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            first = dataset[0] if len(dataset) and not isinstance(dataset, dict | str) else None
            plain = first is not None and not isinstance(first, dict)
            self._items = dataset if plain else as_dataset(dataset, "dataset")
        elif hasattr(dataset, "__iter__") and not isinstance(dataset, dict):
            self._items = list(dataset)
            if not self._items:
                raise DatasetError("dataset is empty")
        else:
            raise DatasetError(
                f"dataset is a {type(dataset).__name__}: pass a list of items, what "
                "get_custom_dataset returns, or a JSONL file's path"
            )

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]

    def fingerprint(self) -> str:
        """The same for the same items in the same order, as far as they are JSON."""
        digest = hashlib.blake2b(digest_size=8)
        for index in range(len(self)):
            digest.update(_text(self[index]).encode(errors="replace"))
            digest.update(b"\n")
        return digest.hexdigest()

    def task(self, index: int) -> str | None:
        """The item's own name for its task, as a name that the service takes."""
        item = self[index]
        own = item.get("task_id") if isinstance(item, dict) else None
        if not isinstance(own, int | str) or own == "":
            return None
        name = _NOT_IN_NAMES.sub("-", str(own)).lstrip("._-")[:_LONGEST]
        return name if re.fullmatch(NAME_PATTERN, name) else None


class RunPlan:
    """All places of a run in their order, and the names of what happens there."""

    def __init__(self, header: PlanHeader, epochs: int) -> None:
        self.header = header
        self.epochs = epochs

    def __len__(self) -> int:
        return self.epochs * self.header.items * self.header.group_size

    def __iter__(self) -> Iterator[RunId]:
        for epoch in range(self.epochs):
            for item in range(self.header.items):
                for member in range(self.header.group_size):
                    yield RunId(epoch, item, member)

    def group(self, place: RunId, generation: int = 0) -> str:
        """Later generations are of those whose group closed without them."""
        name = f"{self.header.run}-{place.epoch}-{place.item}"
        return f"{name}.{generation}" if generation else name

    def key(self, place: RunId, attempt: int, what: str) -> str:
        """The Idempotency-Key of what happens once in an attempt."""
        spot = f"{place.epoch}-{place.item}-{place.member}"
        return f"{self.header.run}-{spot}-{attempt}-{what}"


def new_run() -> str:
    """A name that no other run has."""
    return f"run-{secrets.token_hex(6)}"


def _text(item: Any) -> str:
    """As JSON. What is none goes by its kind: its own text may differ at every start."""
    try:
        return json.dumps(item, sort_keys=True, default=lambda value: type(value).__name__)
    except (TypeError, ValueError, RecursionError):
        # Keys of several kinds, or that are no text; an item that holds itself.
        return type(item).__name__


def _there(path: Path) -> Path:
    if not path.exists():
        raise DatasetError(f"there is no file {path} (looked from {Path.cwd()})")
    return path
