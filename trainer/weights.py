"""Published weights: one folder per version, in Hugging Face's layout, for engines to load."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from any_agent.atomic import remove_folder, whole_folder
from any_agent.errors import Conflict, StartupError
from any_agent.rundir import weights_folder
from trainer.policy import Policy

_NAME = re.compile(r"v(\d{8,})")
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
    policy: Policy,
    tokenizer: Any,
    root: Path,
    version: int,
    *,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write ``root/v{version:08d}``: weights, configuration and tokenizer, whole or not at all.

    ``tokenizer`` is a folder whose tokenizer files are copied unchanged, or a tokenizer to save.
    Floating-point weights are written in ``dtype``, default as trained (float32). Raises Conflict
    unless ``version`` is above every one in ``root``: engines key their caches by it.
    """
    newest = max(published_versions(root), default=-1)
    if version <= newest:
        raise Conflict(f"version {version} is not above {newest}: versions are never reused")
    target = weights_folder(root, version)
    with whole_folder(target) as folder:
        save_pretrained(policy, tokenizer, folder, dtype=dtype)
    return target


def holds_weights(folder: Path, policy: Policy, *, dtype: torch.dtype | None = None) -> bool:
    """Whether a published folder's weights are the policy's, bit for bit, in ``dtype``.

    Tied weights are stored once, so what counts is that every stored tensor is the policy's.
    """
    state = policy.model.state_dict()
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                mine = state.get(name)
                if mine is None:
                    return False
                mine = mine if dtype is None else _cast(mine, dtype)
                other = stored.get_tensor(name)
                if other.dtype != mine.dtype or not torch.equal(other, mine.cpu()):
                    return False
    return bool(files)


def tokenizer_of(model: str) -> Path:
    """The folder of a model's tokenizer files; of a hub name, its cached copy."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, allow_patterns=list(_TOKENIZER_FILES)))


def published_versions(root: Path) -> list[int]:
    """The versions in ``root``, ascending."""
    if not root.is_dir():
        return []
    names = (_NAME.fullmatch(path.name) for path in root.iterdir())
    return sorted(int(match[1]) for match in names if match)


def prune(root: Path, keep: int) -> list[int]:
    """Remove all but the ``keep`` (at least one) newest versions; returns the removed ones."""
    if keep < 1:
        raise ValueError("at least one version must be kept")
    removed = published_versions(root)[:-keep]
    for version in removed:
        remove_folder(weights_folder(root, version))
    return removed


def save_pretrained(
    policy: Policy, tokenizer: Any, folder: Path, *, dtype: torch.dtype | None = None
) -> None:
    """Model (safetensors), configuration and tokenizer as ``AutoModelForCausalLM`` loads them."""
    if dtype is None:
        policy.model.save_pretrained(folder)
    else:
        state = {name: _cast(t, dtype) for name, t in policy.model.state_dict().items()}
        policy.model.save_pretrained(folder, state_dict=state)
        # save_pretrained records the type the model computes in, not that of the given tensors.
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["dtype"] = str(dtype).removeprefix("torch.")
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if isinstance(tokenizer, str | Path):
        _copy_tokenizer(Path(tokenizer), folder)
    else:
        tokenizer.save_pretrained(folder)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _copy_tokenizer(source: Path, folder: Path) -> None:
    found = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise StartupError(f"{source} holds no tokenizer files")
    for path in found:
        shutil.copyfile(path, folder / path.name)
