"""Datasets read from JSONL and Parquet files, from folders, and by Hugging Face's `datasets`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from any_agent.config import DatasetConfig
from any_agent.data.json_lines import read_json_lines
from any_agent.data.rows import DataRow, LazyRows, RowDataset
from any_agent.errors import DatasetError

log = logging.getLogger(__name__)

_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
"""Files that `save_to_disk` writes into a folder."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
JSONL = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
INSTALL = 'pip install "any-agent-rl[data]"'


def read_file(path: Path) -> RowDataset:
    """Read a file by its ending; DatasetError names the file and, for JSONL, the line."""
    if path.suffix in JSONL:
        return read_json_lines(path)
    if path.suffix in PARQUET:
        return _read_parquet(path)
    raise DatasetError(f"{path} ends in none of {', '.join(JSONL + PARQUET)}: rename or convert it")


def read_files(paths: list[Path]) -> RowDataset:
    """Return the rows of several files, one file after the other."""
    parts = [read_file(path) for path in paths]
    if len(parts) == 1:
        return parts[0]
    places = [(part, k) for part in parts for k in range(len(part))]
    rows = LazyRows(len(places), lambda k: places[k][0][places[k][1]])
    return RowDataset(rows, lambda k: places[k][0].where(places[k][1]))


def files_of(folder: Path, name: str, split: str | None) -> list[Path]:
    """Return the files of a split, in a folder laid out by hand or as on the Hugging Face hub.

    They are ``<split>.<ending>`` or ``<split>-*.<ending>`` in the folder itself, in its folder
    ``name``, or in its folder ``data``. Raises DatasetError naming the splits that exist.
    """
    places = [folder / name] if name else [folder, folder / "data"]
    splits: dict[str, list[Path]] = {}
    for place in places:
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.is_file() and path.suffix in JSONL + PARQUET:
                splits.setdefault(_split_of(path), []).append(path)
    if not splits:
        looked = " or ".join(str(place) for place in places)
        raise DatasetError(
            f"there is no file in {looked} that ends in {', '.join(JSONL + PARQUET)}"
        )
    return splits[chosen(splits, split, folder)]


def chosen(splits: Mapping[str, object], split: str | None, where: object) -> str:
    """Return the requested split, or the only one."""
    if split is None and len(splits) == 1:
        return next(iter(splits))
    if split is not None and split in splits:
        return split
    problem = f"has no split {split!r}" if split else "has several splits"
    raise DatasetError(f"{where} {problem}: set `split` to one of {', '.join(sorted(splits))}")


def _split_of(path: Path) -> str:
    return path.name.partition(".")[0].partition("-")[0]


def _read_parquet(path: Path) -> RowDataset:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DatasetError(f"reading {path} needs pyarrow: {INSTALL}") from None
    try:
        table = parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DatasetError(f"cannot read {path} as Parquet: {error}") from None
    rows = LazyRows(table.num_rows, lambda k: table.slice(k, 1).to_pylist()[0])
    return RowDataset(rows, lambda k: f"{path} row {k + 1}")


def get_custom_dataset(
    split: str | None = None,
    dataset_config: DatasetConfig | None = None,
    tokenizer: Any = None,
    *,
    path: str | Path | None = None,
    name: str | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    fields: tuple[str, ...] = (),
) -> RowDataset:
    """Return the items of a dataset; each is a dictionary.

    ``dataset_config`` is ``config.train_dataset`` or ``config.valid_dataset``; the other arguments
    take precedence over it. ``fields`` must be in every item. ``max_length`` needs the
    ``tokenizer``, and leaves out items whose prompt is longer: the field ``messages`` as the chat
    template writes it, else the text in ``prompt`` or ``question``.

    Raises DatasetError naming the file and the line, the missing field, or the existing splits.
    """
    given = {
        "split": split,
        "path": path and str(path),
        "name": name,
        "max_length": max_length,
        "limit": limit,
    }
    settings = dataset_config.model_dump() if dataset_config is not None else {}
    settings |= {key: value for key, value in given.items() if value is not None}
    c = DatasetConfig.model_validate(settings)
    if not c.path:
        raise DatasetError(
            "no dataset is named: set train_dataset.path, or valid_dataset.path for an evaluation"
        )
    dataset = _read(c).require(*fields)
    if c.limit is not None:
        dataset = dataset[: c.limit]
    if c.max_length is not None:
        dataset = _limit_prompts(dataset, tokenizer, c.max_length)
    if not len(dataset):
        raise DatasetError(f"{c.path} has no items{' that are left' if c.max_length else ''}")
    return dataset


def _read(c: DatasetConfig) -> RowDataset:
    path = Path(c.path)
    if path.is_dir():
        if any((path / file).exists() for file in _SAVED):
            return _of_datasets(c, saved=True)
        return read_files(files_of(path, c.name, c.split))
    if path.exists():
        return read_file(path)
    if not _HUB_NAME.fullmatch(c.path) or path.suffix in JSONL + PARQUET:
        raise DatasetError(
            f"{_not_here(c.path)}; a data set on the Hugging Face hub is owner/name, as in "
            "openai/gsm8k"
        )
    return _of_datasets(c, saved=False)


def _not_here(path: str) -> str:
    return f"there is no file or folder {path} (looked from {Path.cwd()})"


def _of_datasets(c: DatasetConfig, *, saved: bool) -> RowDataset:
    try:
        import datasets
    except ImportError:
        raise DatasetError(f"reading {c.path} needs Hugging Face's datasets: {INSTALL}") from None
    try:
        if saved:
            found = datasets.load_from_disk(c.path)
        else:
            found = datasets.load_dataset(c.path, c.name or None, split=c.split)
    except Exception as error:
        says = f"cannot load {c.path} as a folder of datasets.save_to_disk: {error}"
        if not saved:
            says = f"{_not_here(c.path)}, and the Hugging Face hub does not give it: {error}"
        raise DatasetError(says) from error
    where = " ".join(part for part in (c.path, c.name, c.split) if part)
    if isinstance(found, datasets.DatasetDict):
        part = chosen(found, c.split, c.path)
        found, where = found[part], f"{c.path} {part}"
    return RowDataset(found, lambda k: f"{where} row {k + 1}")


def _limit_prompts(dataset: RowDataset, tokenizer: Any, most: int) -> RowDataset:
    if tokenizer is None:
        raise DatasetError("max_length counts tokens: pass get_custom_dataset a tokenizer")
    kept = dataset.filter(lambda row: _prompt_tokens(row, tokenizer) <= most)
    if len(kept) < len(dataset):
        log.info(
            "%d of %d items have prompts of more than %d tokens and are left out",
            *(len(dataset) - len(kept), len(dataset), most),
        )
    return kept


def _prompt_tokens(row: DataRow, tokenizer: Any) -> int:
    messages = row.get("messages")
    if messages is not None and tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    elif messages is not None:
        text = "\n".join(str(message["content"]) for message in messages)
    else:
        text = next((row[field] for field in ("prompt", "question") if field in row), None)
    if not isinstance(text, str):
        raise DatasetError(
            f"{row.where}: max_length needs the field messages, or a text in prompt or question"
        )
    return len(tokenizer.encode(text, add_special_tokens=False))
