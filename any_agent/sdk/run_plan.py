"""`RunPlan`: the runs of an agent on a dataset, and their names at the service.

Names follow from the plan's own name and the run, so that a runner that is started again after a
crash sends the service the same requests, and gets the same answers.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from any_agent.config import NAME_PATTERN
from any_agent.data.dataset import read_file
from any_agent.data.rows import as_dataset, rows_of_table
from any_agent.errors import DatasetError

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 64


class RunId(NamedTuple):
    """One run of the agent, which becomes one trained session."""

    epoch: int
    item: int
    member: int


@dataclass(frozen=True, slots=True)
class PlanHeader:
    """The identity of a plan, and the first line of its file of results."""

    run: str
    data: str
    """A fingerprint of the items."""
    items: int
    group_size: int
    mode: str
    service: str
    """experiment/trial: another service does not know these sessions."""
    agent: str = ""
    """The agent's name, if one was given."""

    def as_dict(self) -> dict[str, Any]:
        return {"any_agent_run": 1, **asdict(self)}


def items_of(dataset: Any) -> Sequence[Any]:
    """Return the items of a dataset of any supported form; DatasetError, naming the file and the
    line, for any other dataset."""
    if isinstance(dataset, str | Path):
        path = Path(dataset)
        if not path.exists():
            raise DatasetError(f"there is no file {path} (current folder: {Path.cwd()})")
        items: Sequence[Any] = read_file(path)
        if not len(items):
            raise DatasetError(f"{dataset} has no items")
        return items
    if (rows := rows_of_table(dataset)) is not None:
        dataset = rows
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        first = dataset[0] if len(dataset) and not isinstance(dataset, dict | str) else None
        plain = first is not None and not isinstance(first, dict)
        return dataset if plain else as_dataset(dataset, "dataset")
    if hasattr(dataset, "__iter__") and not isinstance(dataset, dict):
        items = list(dataset)
        if not items:
            raise DatasetError("dataset is empty")
        return items
    raise DatasetError(
        f"dataset is a {type(dataset).__name__}: pass a list of items, what "
        "get_custom_dataset returns, or a JSONL file's path"
    )


def fingerprint(items: Sequence[Any]) -> str:
    """Return a digest, equal for the same items in the same order as far as they are JSON."""
    digest = hashlib.blake2b(digest_size=8)
    for index in range(len(items)):
        digest.update(_text(items[index]).encode(errors="replace"))
        digest.update(b"\n")
    return digest.hexdigest()


def task_of(item: Any) -> str | None:
    """Return the item's own task id, as a name that the service accepts; None without one."""
    own = item.get("task_id") if isinstance(item, dict) else None
    if not isinstance(own, int | str) or own == "":
        return None
    name = _NOT_IN_NAMES.sub("-", str(own)).lstrip("._-")[:_MAX_NAME]
    return name if re.fullmatch(NAME_PATTERN, name) else None


class RunPlan:
    """All runs in their order, and their names at the service."""

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

    def group(self, run: RunId, generation: int = 0) -> str:
        """Return the name of a run's group; later generations are of runs whose group closed
        without them."""
        name = f"{self.header.run}-{run.epoch}-{run.item}"
        return f"{name}.{generation}" if generation else name

    def key(self, run: RunId, attempt: int, event: str) -> str:
        """Return the Idempotency-Key of an event that happens once in an attempt."""
        return f"{self.header.run}-{run.epoch}-{run.item}-{run.member}-{attempt}-{event}"


def new_run() -> str:
    """Return a unique name for a plan."""
    return f"run-{secrets.token_hex(6)}"


def _text(item: Any) -> str:
    """Return the item as JSON, with the type of each part that JSON cannot hold, since its text may
    differ at every start."""
    try:
        return json.dumps(item, sort_keys=True, default=lambda value: type(value).__name__)
    except (TypeError, ValueError, RecursionError):
        # It has keys of several types, or keys that are no text, or contains itself.
        return type(item).__name__
