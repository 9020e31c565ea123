"""Checkpoints: the complete state for a bit-exact resume, in Hugging Face's layout.

::

    step-00000012/            model, configuration, tokenizer: Hugging Face's layout
      trainer/                a folder, because engines load every *.safetensors beside the model
        optimizer.safetensors   moments by parameter name; with several processes the leading
                                one's shares, and beside it a file of each other one
        state.json              steps, optimizer scalars, the generators of torch, Python and
                                numpy, and the caller's state
      adapter/                with LoRA: the adapter as peft writes it, which is in the model, too
      manifest.json           every other file with its size and checksum, written last
    latest                    the name of the newest checkpoint
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from any_agent.errors import ConfigError, NotFound, StartupError
from any_agent.launcher.trial import check_model
from any_agent.rundir.checksums import damaged_folders, set_aside, sound, write_manifest
from any_agent.rundir.layout import (
    checkpoint_folder,
    checkpoint_problem,
    latest_step,
    saved_steps,
)
from any_agent.runtime.atomic_files import atomic_folder, remove_folder, write_atomic
from trainer import adapter_files, sharded_optimizer
from trainer.model import PolicyConfig
from trainer.policy import Policy
from trainer.weight_folders import save_pretrained, weights_bytes
from trainer.world import World

logger = logging.getLogger(__name__)

FORMAT = 3


def save_checkpoint(
    root: Path,
    policy: Policy,
    tokenizer: Path,
    state: Mapping[str, Any],
    *,
    keep: int | None = None,
) -> Path:
    """Write ``root/step-{policy.steps:08d}``, point ``latest`` at it, prune to ``keep``.

    ``state`` is the caller's own (versions, consumed session ids, ...): JSON. A folder of the same
    step from an abandoned history is replaced.

    If several processes train together the leading one calls it, and the others write their
    shares of the optimizer's state; any number of processes can resume from it.
    """
    target = checkpoint_folder(root, policy.steps)
    document = _state_document(policy, state)
    with atomic_folder(target, replace=True) as folder:
        save_pretrained(policy, tokenizer, folder)
        if policy.config.lora is not None:
            adapter_files.save_adapter(policy, folder / adapter_files.FOLDER)
        extra = folder / "trainer"
        extra.mkdir()
        with policy.commanded({"do": "save", "folder": str(extra)}):
            sharded_optimizer.save_shard(policy, extra)
        (extra / "state.json").write_text(document, encoding="utf-8")
        write_manifest(folder)
    write_atomic(root / "latest", target.name + "\n")
    if keep is not None:
        prune_checkpoints(root, keep)
    return target


def checkpoint_bytes(policy: Policy) -> int:
    """Return the bytes that a checkpoint certainly has: weights, and moments after a step."""
    trained = [p for p in policy.model.parameters() if policy.optimizer.state.get(p)]
    moments: int = sum(2 * p.numel() * p.element_size() for p in trained)
    return weights_bytes(policy) + moments


def load_checkpoint(
    path: Path,
    config: PolicyConfig | None = None,
    *,
    world: World | None = None,
    base: str | Path | None = None,
) -> tuple[Policy, dict[str, Any]]:
    """Return the policy exactly as :func:`save_checkpoint` saw it, and its ``state``.

    The optimizer's settings are the saved ones (the learning rate may follow a schedule); device,
    chunks and the like come from ``config``. With LoRA the checkpoint's adapter is put on the model
    ``base``, by default the one that the checkpoint names. Restores the generators of torch, Python
    and numpy. All processes of a ``world`` must call it together. Raises NotFound if the folder is
    not a complete checkpoint, StartupError if it does not fit, ConfigError for another base or
    adapter.
    """
    if problem := checkpoint_problem(path):
        raise NotFound(f"{path} is not a complete checkpoint: {problem}")
    config = config or PolicyConfig()
    extra = path / "trainer"
    saved = json.loads((extra / "state.json").read_text(encoding="utf-8"))
    if saved["format"] != FORMAT:
        raise StartupError(
            f"{path} has format {saved['format']}, but this version of any-agent reads format "
            f"{FORMAT}: use the any-agent that wrote it, or choose another --trial"
        )
    adapter = saved.get("adapter")
    adapter_files.require_same_settings(path, adapter, config.lora)
    if adapter is None:
        policy = Policy.load(path, config, world)
    else:
        if not base and adapter["base"] is None:
            raise ConfigError(
                f"{path} does not name the model that its adapter is trained on: set model.path, "
                "or give load_checkpoint its base"
            )
        base = base or adapter["base"]["path"]
        check_model(str(base))
        policy = Policy.load(base, config, world)
        adapter_files.require_same_model(path, adapter, policy)
        adapter_files.load_adapter(policy, path / adapter_files.FOLDER)
    _restore_optimizer(policy, extra, saved["optimizer"])
    policy.steps = saved["steps"]
    policy.runner.choose_as(saved["pass_tokens"])
    # Last: building the model drew random numbers.
    _restore_generators(saved["generators"])
    return policy, saved["state"]


def complete_checkpoints(root: Path) -> dict[int, Path]:
    """Return the complete checkpoints by the number of train steps behind them, ascending;
    broken ones are logged and skipped."""
    found = saved_steps(root)
    for step, path in list(found.items()):
        if problem := checkpoint_problem(path):
            logger.warning("checkpoint %s is not complete and is skipped: %s", path, problem)
            del found[step]
    return found


def latest_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint to resume from: the one that ``latest`` names; None before the first.

    If that one is broken, it is the newest whole one before it, with a warning; never a later
    one, which belongs to an abandoned history. Without a readable ``latest`` it is the newest
    whole one. Its content is read; a damaged one is set aside. Raises ConfigError if there were
    checkpoints and none is whole: training must not begin anew unasked.
    """
    limit = latest_step(root)
    found = saved_steps(root)
    steps = [step for step in found if limit is None or step <= limit]
    newest = next((step for step in reversed(steps) if _is_whole(found[step])), None)
    if newest is None:
        lost = damaged_folders(root)
        if limit is not None or lost:
            raise ConfigError(
                f"no checkpoint in {root} is whole ({', '.join(lost) or 'all are gone'}): restore "
                "one from a copy, or choose another --trial to begin anew"
            )
        return None
    path = found[newest]
    if newest != limit and limit is not None:
        logger.warning("checkpoint step %d is missing or broken; falling back to %s", limit, path)
    return path


def _is_whole(path: Path) -> bool:
    """Return True if a checkpoint has all that was written; any other is set aside."""
    if (problem := checkpoint_problem(path)) is not None:
        set_aside(path, problem)
        return False
    return sound(path)


def prune_checkpoints(root: Path, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest of the history that ``latest`` ends; return the removed.

    Later steps than ``latest`` belong to an abandoned history and are removed, too.
    """
    if keep < 1:
        raise ValueError("at least one checkpoint must be kept")
    limit = latest_step(root)
    found = complete_checkpoints(root)
    kept = [step for step in found if limit is None or step <= limit][-keep:]
    removed = [path for step, path in found.items() if step not in kept]
    for path in removed:
        remove_folder(path)
    return removed


def _restore_optimizer(policy: Policy, folder: Path, groups: list[dict[str, Any]]) -> None:
    """Load the moments of this process's parameters, whichever process wrote them."""
    # In the optimizer's order.
    parameters = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    index = {name: k for k, name in enumerate(parameters)}
    moments: dict[str, Tensor] = {}
    state: dict[int, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("optimizer*.safetensors")):
        with sharded_optimizer.opened(path) as file:
            shapes = {name: shape for name, (_, shape) in sharded_optimizer.places_in(file).items()}
        for name in sorted(shapes.keys() - moments.keys()):
            owner, key = name.rsplit("/", 1)
            if owner not in parameters:
                raise StartupError(
                    f"{path}: the optimizer's state has a parameter that the model lacks: {owner}"
                )
            like = parameters[owner].detach() if shapes[name] else torch.zeros(())
            moments[name] = torch.zeros_like(like)
            state.setdefault(index[owner], {})[key] = moments[name]
    sharded_optimizer.load_shards(folder, moments)
    now = policy.optimizer.state_dict()["param_groups"]
    merged = [group | saved for group, saved in zip(now, groups, strict=True)]
    policy.optimizer.load_state_dict({"state": state, "param_groups": merged})


def _state_document(policy: Policy, state: Mapping[str, Any]) -> str:
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in policy.optimizer.state_dict()["param_groups"]
    ]
    document = {
        "format": FORMAT,
        "steps": policy.steps,
        "pass_tokens": policy.runner.chosen,
        "optimizer": groups,
        "generators": _generators(),
        "adapter": adapter_files.record(policy),
        "state": dict(state),
    }
    return json.dumps(document, allow_nan=False)


def _generators() -> dict[str, Any]:
    """Return the states of torch's, on CPU and GPUs, Python's and numpy's generators."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": [state.tolist() for state in (torch.get_rng_state(), *gpus)],
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }


def _restore_generators(saved: Mapping[str, Any]) -> None:
    cpu, *gpus = (torch.tensor(state, dtype=torch.uint8) for state in saved["torch"])
    torch.set_rng_state(cpu)
    for k, state in enumerate(gpus[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, k)
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(saved["numpy"]))
