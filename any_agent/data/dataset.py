"""Datasets by their settings: files, folders, and what Hugging Face's `datasets` reads."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from any_agent.config import DatasetConfig
from any_agent.data.files import INSTALL, JSONL, PARQUET, chosen, files_of, read_file, read_files
from any_agent.data.rows import DataRow, RowDataset
from any_agent.errors import DatasetError

log = logging.getLogger(__name__)

_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
"""Files that `save_to_disk` leaves in a folder."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


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
    """The items of a dataset; each is a dictionary.

    ``dataset_config`` is ``config.train_dataset`` or ``config.valid_dataset``; what is given beside
    it takes its place. ``fields`` must be in every item. ``max_length`` needs the ``tokenizer``,
    and leaves out items whose prompt is longer: the field ``messages`` as the chat template writes
    it, else the text in ``prompt`` or ``question``.

    Raises DatasetError naming the file and the line, the missing field, or the splits there are.
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
        dataset = _short_ones(dataset, tokenizer, c.max_length)
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


def _short_ones(dataset: RowDataset, tokenizer: Any, most: int) -> RowDataset:
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
