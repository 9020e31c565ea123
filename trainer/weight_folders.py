"""Published weights: one folder per version, in Hugging Face's layout, for engines to load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from any_agent.errors import Conflict, StartupError
from any_agent.rundir.checksums import write_manifest
from any_agent.rundir.layout import published_versions, weights_folder
from any_agent.runtime.atomic_files import atomic_folder, remove_folder
from trainer.adapter_files import FOLDER, save_adapter
from trainer.policy import Policy
from trainer.weight_buckets import published_dtype, stored_tensors

_BUCKET = 4 << 30  # bytes of weights that are whole in memory at once, and that one file has
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)


def publish_to_disk(
    policy: Policy, tokenizer: Path, root: Path, version: int, *, dtype: torch.dtype | None = None
) -> Path:
    """Write ``root/v{version:08d}``: weights, configuration and tokenizer, all or nothing.

    ``tokenizer`` is a folder whose tokenizer files are copied unchanged.
    Floating-point weights are written in ``dtype``, default as trained (float32). Raises Conflict
    unless ``version`` is above every one in ``root``: engines key their caches by it.
    """
    with _new_version(root, version) as folder:
        save_pretrained(policy, tokenizer, folder, dtype=dtype)
    return weights_folder(root, version)


def publish_adapter(policy: Policy, root: Path, version: int) -> Path:
    """Write ``root/v{version:08d}`` with the adapter alone, in the folder `adapter`, as
    :func:`publish_to_disk`."""
    with _new_version(root, version) as folder:
        save_adapter(policy, folder / FOLDER)
    return weights_folder(root, version)


@contextmanager
def _new_version(root: Path, version: int) -> Iterator[Path]:
    newest = max(published_versions(root), default=-1)
    if version <= newest:
        raise Conflict(f"version {version} is not above {newest}: versions are never reused")
    with atomic_folder(weights_folder(root, version)) as folder:
        yield folder
        write_manifest(folder)


def weights_bytes(policy: Policy, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of the weights' tensors in ``dtype``."""
    stored = stored_tensors(policy.model).values()
    return sum(t.numel() * published_dtype(t, dtype).itemsize for t in stored)


def holds_weights(folder: Path, policy: Policy, *, dtype: torch.dtype | None = None) -> bool:
    """Return True if a published folder's weights are the policy's, bit for bit, in ``dtype``."""
    with ExitStack() as stack:
        stored: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            stored |= dict.fromkeys(file.keys(), file)
        if not stored:
            return False
        left = set(stored)
        for name, mine in (pair for part in policy.buckets(_BUCKET, dtype) for pair in part):
            if name not in stored:
                return False
            other = stored[name].get_tensor(name)
            if other.dtype != mine.dtype or not torch.equal(other, mine.cpu()):
                return False
            left.discard(name)
        return not left


def tokenizer_of(model: str) -> Path:
    """Return the folder of a model's tokenizer files; for a hub name, its cached copy."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=list(_TOKENIZER_FILES)))


def prune(root: Path, keep: int) -> list[int]:
    """Remove all but the ``keep`` (at least one) newest versions; return the removed ones."""
    if keep < 1:
        raise ValueError("at least one version must be kept")
    removed = published_versions(root)[:-keep]
    for version in removed:
        remove_folder(weights_folder(root, version))
    return removed


def save_pretrained(
    policy: Policy, tokenizer: Path, folder: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Write model (safetensors), configuration and tokenizer files for ``AutoModelForCausalLM``.

    Weights beyond ``_BUCKET`` bytes go to several files with an index, so that no more than these
    are in memory beside the model.
    """
    policy.model.config.save_pretrained(folder)
    generation = getattr(policy.model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    # The configuration states the type that the model computes in; these tensors have another.
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["architectures"] = [type(policy.model).__name__]
    config["dtype"] = str(_save_weights(policy, folder, dtype)).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    copy_tokenizer(tokenizer, folder)


def _save_weights(policy: Policy, folder: Path, dtype: torch.dtype | None) -> torch.dtype:
    """Write all buckets; return the type of the first floating-point tensor."""
    files: list[list[str]] = []
    total, kind = 0, dtype
    for bucket in policy.buckets(_BUCKET, dtype):
        tensors = {name: tensor.cpu() for name, tensor in bucket}
        save_file(tensors, folder / f"{len(files)}.part", metadata={"format": "pt"})
        files.append(list(tensors))
        total += sum(t.nbytes for t in tensors.values())
        kind = kind or next((t.dtype for t in tensors.values() if t.is_floating_point()), None)
    names = ["model.safetensors"]
    if len(files) > 1:
        names = [f"model-{k:05d}-of-{len(files):05d}.safetensors" for k in range(1, 1 + len(files))]
        where = {name: file for file, held in zip(names, files, strict=True) for name in held}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    for k, name in enumerate(names):
        (folder / f"{k}.part").rename(folder / name)
    return kind or torch.float32


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a model's tokenizer files; StartupError without any."""
    found = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise StartupError(
            f"{source} has no tokenizer files: add the model's tokenizer.json, or "
            "set model.path to a folder that has one"
        )
    for path in found:
        shutil.copyfile(path, folder / path.name)
